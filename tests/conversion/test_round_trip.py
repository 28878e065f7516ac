"""HuggingFace to ours and back: the same tensors, config and tokenizer, opened by transformers as they are."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.training.arguments import build_config
from megatron.training.checkpointing_layout import find_checkpoint
from megatron.training.checkpointing_safety import checksum_lines, file_sha256, read_checksums
from megatron.training.conversion import cli
from megatron.training.conversion.exporter import OurModel, export_checkpoint
from megatron.training.conversion.importer import import_checkpoint
from megatron.training.conversion.model_args import NOT_THE_FUNCTION, read_flags_script
from megatron.training.conversion.parity import BOUND
from tests.conversion import tiny_models
from tests.conversion.test_parity import DTYPES

REST = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4", "--mock-data"]


def tensors_of(folder):
    """Return every tensor of a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_round_trip_is_bitwise(converted, tmp_path, name):
    """Export gives back every tensor in its bits and type, the config's text and the tokenizer's files."""
    model = converted(name, DTYPES[name])
    out = tmp_path / "out"
    done = export_checkpoint(model.ours, out, max_shard_bytes=100_000)
    before, after = tensors_of(model.hf), tensors_of(out)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype == DTYPES[name]
        assert torch.equal(after[key], tensor)
    side = [path for path in model.hf.iterdir() if not path.name.startswith("model")]
    assert {path.name for path in side} >= {"config.json", "generation_config.json", "tokenizer.json"}
    for path in side:
        assert (out / path.name).read_bytes() == path.read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in after.values())
    assert done.num_files == len(list(out.glob("*.safetensors"))) > 1


def test_transformers_opens_the_export(converted, tmp_path):
    """AutoModelForCausalLM and AutoTokenizer open the folder, and the logits are the original's."""
    model = converted("qwen3")
    export_checkpoint(model.ours, tmp_path / "out")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        one = AutoModelForCausalLM.from_pretrained(model.hf)(tokens).logits
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    assert torch.equal(one, other)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w1").input_ids == [6, 4]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_flags_are_the_model(converted):
    """train_flags.sh, read by our own parser, gives the model, vocabulary and tokenizer that the checkpoint keeps."""
    for name in tiny_models.MODELS:
        ours = converted(name, DTYPES[name]).ours
        config = build_config([*read_flags_script(ours), *REST])
        checkpoint = OurModel(ours)
        assert config.model == checkpoint.model
        assert config.data.unpadded_vocab_size == 101
        assert config.data.tokenizer_model == str(ours / "tokenizer")
        assert config.model.hidden_dropout == config.model.attention_dropout == 0.0
        assert config.with_vocab(90).data.padded_vocab_size == 128
        assert not config.notes


def test_flags_script_runs_in_bash(converted):
    """bash reads the same words from train_flags.sh as our reader."""
    import subprocess

    ours = converted("mistral", DTYPES["mistral"]).ours
    command = f'source "{ours}/train_flags.sh"; printf "%s\\n" "${{MODEL_FLAGS[@]}}"'
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=20).stdout
    assert printed.splitlines() == read_flags_script(ours)
    assert "19,0" in printed.splitlines()


def test_release_checkpoint_is_found(converted):
    """--load finds the release, whose arguments are readable for --use-checkpoint-args."""
    ours = converted("llama3", DTYPES["llama3"]).ours
    folder, iteration = find_checkpoint(ours, None)
    assert (folder.name, iteration) == ("release", "release")
    saved = OurModel(ours).args
    config = build_config(
        ["--use-checkpoint-args", "--load", str(ours), *REST], read_checkpoint_args=lambda checkpoint: saved
    )
    assert config.model == OurModel(ours).model
    assert config.data.tokenizer_model == str(ours / "tokenizer")


def test_targets_go_into_the_flags(converted, tmp_path):
    """--target-*-parallel-size are checked against the model and written into train_flags.sh; the bits stay."""
    model = converted("llama2", DTYPES["llama2"])
    words = ["import", "--hf", str(model.hf), "--save", str(tmp_path / "two")]
    assert cli.main([*words, "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]) == 0
    flags = read_flags_script(tmp_path / "two")
    config = build_config([*flags, *REST], world_size=4)
    assert config.parallel.tensor_model_parallel_size == config.parallel.pipeline_model_parallel_size == 2
    one, two = OurModel(model.ours), OurModel(tmp_path / "two")
    for rule in one.rules:
        assert torch.equal(one.reader.read(rule.key, rule.layer), two.reader.read(rule.key, rule.layer))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.25, "high_freq_factor": 5.0, "original_max_position_embeddings": 64}
# How transformers 4 and 5 write the same rotary embedding.
SPELLINGS = {
    "llama3": [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}},
    ],
    "qwen2": [
        {"rope_theta": 1000000.0},
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}},
    ],
    "neox": [
        {"rotary_pct": 0.25, "rotary_emb_base": 10000},
        {},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}},
    ],
}
ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")


@pytest.mark.parametrize(("name", "number"), [(name, i) for name in SPELLINGS for i in range(3)])
def test_both_spellings_of_rope(converted, tmp_path, name, number):
    """A config in either spelling means the same model, whichever transformers is installed, and is given back."""
    model = converted(name, DTYPES[name])
    folder = copy_folder(model.hf, tmp_path / "hf")
    raw = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k not in ROPE_KEYS}
    raw.update(SPELLINGS[name][number])
    dtype = raw.pop("dtype", None) or raw.pop("torch_dtype")
    raw["torch_dtype" if number < 2 else "dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(raw))
    import_checkpoint(folder, tmp_path / "ours")
    assert OurModel(tmp_path / "ours").model == OurModel(model.ours).model
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def copy_folder(source, target):
    import shutil

    return shutil.copytree(source, target)


def test_pickles_are_read(converted, tmp_path):
    """A folder of pytorch_model.bin files gives the same checkpoint as safetensors."""
    model = converted("qwen2", DTYPES["qwen2"])
    folder = copy_folder(model.hf, tmp_path / "hf")
    tensors = tensors_of(folder)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    import_checkpoint(folder, tmp_path / "ours")
    one, two = OurModel(model.ours), OurModel(tmp_path / "ours")
    for rule in one.rules:
        assert torch.equal(one.reader.read(rule.key, rule.layer), two.reader.read(rule.key, rule.layer))


def test_tied_output_may_be_stored(converted, tmp_path):
    """A tied model whose file repeats the embedding as its output layer is taken, with a note."""
    model = converted("llama_tied", DTYPES["llama_tied"])
    folder = copy_folder(model.hf, tmp_path / "hf")
    tensors = tensors_of(folder)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "pytorch_model.bin")
    assert "tied" in import_checkpoint(folder, tmp_path / "ours").notes[0]
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        import_checkpoint(folder, tmp_path / "other")


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_config_can_be_made_anew(converted, tmp_path, name):
    """Without the original's config, export describes the checkpoint, and transformers computes the same logits."""
    model = converted(name, DTYPES[name])
    ours = copy_folder(model.ours, tmp_path / "ours")
    for path in (ours / "tokenizer").glob("*config.json"):
        if path.name != "tokenizer_config.json":
            path.unlink()
    change_common(ours, tokenizer_model=str(ours / "tokenizer"))
    done = export_checkpoint(ours, tmp_path / "out")
    assert "no config.json" in done.notes[0]
    tokens = torch.randint(0, 101, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one = AutoModelForCausalLM.from_pretrained(model.hf).float()(tokens).logits
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()(tokens).logits
    assert (one - other).abs().max() / one.std() <= BOUND


def change_common(ours, vocab_size=None, **args):
    """Let a copied checkpoint keep other arguments and size of its tokenizer, with checksums that fit."""
    path = ours / "release" / "common.pt"
    common = torch.load(path, weights_only=False)
    vars(common["args"]).update(args)
    common["deep_offload"]["vocab_size"] = vocab_size
    torch.save(common, path)
    sums = read_checksums(ours / "release") | {path.name: file_sha256(path)}
    (ours / "release" / "SHA256SUMS").write_bytes(checksum_lines(sums))


def test_tokenizer_of_another_model(converted, tmp_path):
    """A model that was born here may use another model's tokenizer: it gets its own config and that tokenizer."""
    model, other = converted("llama2", DTYPES["llama2"]), converted("llama3", DTYPES["llama3"])
    ours = copy_folder(model.ours, tmp_path / "ours")
    change_common(ours, tokenizer_model=str(other.hf))
    done = export_checkpoint(ours, tmp_path / "out")
    assert "the model beside the tokenizer is another one" in done.notes[0]
    assert "rotary_base 10000 and 500000" in done.notes[0]
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rope_theta"] == 10000.0 and "rope_scaling" not in raw
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w1").input_ids == [6, 4]


def test_tokenizer_of_a_model_that_is_not_built(converted, tmp_path):
    """The tokenizer's model may be of an architecture that is unknown here, or have more rows than these weights."""
    model = converted("llama2", DTYPES["llama2"])
    ours, other = copy_folder(model.ours, tmp_path / "ours"), copy_folder(model.hf, tmp_path / "hf")
    change_common(ours, tokenizer_model=str(other), unpadded_vocab_size=None, vocab_size=101)
    raw = json.loads((other / "config.json").read_text())
    for number, changes in enumerate(({"architectures": ["GPT2LMHeadModel"]}, {"vocab_size": 512})):
        (other / "config.json").write_text(json.dumps({**raw, **changes}))
        note = export_checkpoint(ours, tmp_path / f"out{number}").notes[0]
        assert ("GPT2LMHeadModel", "vocab_size of at most 128 and 512")[number] in note


@pytest.mark.parametrize(
    ("args", "activation"),
    [
        ({"bias_gelu_fusion": True, "use_cpu": False}, "gelu_fast"),
        ({"bias_gelu_fusion": True, "use_cpu": True}, "gelu"),
        ({"bias_gelu_fusion": False, "use_cpu": False}, "gelu"),
        ({"openai_gelu": True}, "gelu_fast"),
    ],
)
@pytest.mark.parametrize("with_config", [True, False])
def test_activation_is_the_one_that_trained(converted, tmp_path, args, activation, with_config):
    """On GPUs a fused GELU is the tanh approximation: its checkpoint is not exported as one of the exact GELU."""
    ours = copy_folder(converted("neox_exact", DTYPES["neox_exact"]).ours, tmp_path / "ours")
    change_common(ours, tokenizer_model=str(ours / "tokenizer"), **args)
    if not with_config:
        (ours / "tokenizer" / "config.json").unlink()
    done = export_checkpoint(ours, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_act"] == activation
    is_guessed = "openai_gelu" not in args and activation == "gelu_fast"
    assert any("hidden_act is gelu_fast" in note for note in done.notes) == is_guessed


def test_padding_is_left_out(tmp_path):
    """A vocabulary of 101 ids in 128 rows is exported with 101 where the checkpoint knows its tokenizer's size."""
    hf = tiny_models.save(tiny_models.build("llama2", vocab_size=128), tmp_path / "hf")
    import_checkpoint(hf, tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer" / "config.json").unlink()
    change_common(tmp_path / "ours", unpadded_vocab_size=None)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "whole").num_tensors
    change_common(tmp_path / "ours", unpadded_vocab_size=None, vocab_size=101)
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    whole, out = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(whole[name]) == 128 and torch.equal(out[name], whole[name][:101])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 101


def test_another_models_config_is_refused(converted, tmp_path):
    """Export with --hf of a model that computes something else says in what they differ."""
    one, other = converted("llama2", DTYPES["llama2"]), converted("llama3", DTYPES["llama3"])
    words = ["export", "--load", str(one.ours), "--hf-out", str(tmp_path / "out"), "--hf", str(other.hf)]
    assert cli.main(words) == cli.EXIT_USAGE
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="rotary_base 10000 and 500000"):
        export_checkpoint(one.ours, tmp_path / "out", hf=other.hf)


def test_every_setting_is_compared_or_named():
    """The settings that export does not compare are fields of the model, so that none is misspelled."""
    from megatron.training.config import ModelConfig

    assert set(NOT_THE_FUNCTION) <= {item.name for item in dataclasses.fields(ModelConfig)}
