"""Train a small GPT with interleaved offload on text found on this machine, then show and check what happened.

`make demo`, or `python -m examples.demo.run --output out/demo` from the repository's root. Words that the demo does not
know go to pretrain_gpt.py, for example `--offload-gpu-share 0.25`. Ends with code 0 when everything that the demo shows
really happened, and with code 1 and one sentence otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from examples.demo.corpus import build_corpus
from examples.demo.outcome import Outcome, check_outcome, read_outcome, summary_lines

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 8192
ITERATIONS = 200
NEEDED = ("tokenizers", "transformers", "matplotlib")

# Llama in small: RMSNorm, RoPE, SwiGLU, grouped queries, no biases, untied output layer; 10 M parameters.
MODEL = """
--num-layers 8 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 8 --group-query-attention
--num-query-groups 4 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --bf16 --grad-reduce-in-bf16
"""
SCHEDULE = """
--micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --num-workers 1
--log-interval 10 --eval-interval 50 --eval-iters 8 --eval-at-start
"""
# Nothing stays on the GPU, half of the subgroups are updated on each side, and there are about twenty of them.
OFFLOAD = """
--interleaved-offload --offload-resident-fraction 0 --offload-gpu-share 0.5 --offload-subgroup-numel 524288
--log-state-digest
"""


class DemoError(Exception):
    """Why the demo did not show what it promises, in one sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="folder for everything that it writes")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="training steps")
    options, extra = parser.parse_known_args()
    output = options.output.resolve()
    os.chdir(ROOT)  # printed command lines work from here
    try:
        run_demo(output.relative_to(ROOT) if output.is_relative_to(ROOT) else output, options.iterations, extra)
    except (DemoError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def run_demo(output: Path, iterations: int, extra: list[str]) -> None:
    """Do every step of the demo in `output`. Raises DemoError or ValueError, one sentence."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{' and '.join(missing)} cannot be imported: install `.[demo]`, or add the wheels to WHEELS")
    output.mkdir(parents=True, exist_ok=True)
    (output / "timeline.json").unlink(missing_ok=True)  # or an earlier run's would be drawn
    prepare_data(output)
    log = output / "train.log"
    started = time.monotonic()
    run_and_keep(training_command(output, iterations, extra), log)
    training_seconds = time.monotonic() - started
    outcome = read_outcome(log.read_text(encoding="utf-8"), output / "timeline.json")
    draw(outcome, log, output)
    print("\n".join(["", *summary_lines(outcome, training_seconds)]))
    for name in ("loss.png", "timeline.png", "train.log"):
        print(f"{name:>14}  {output / name}")
    problems = check_outcome(outcome)
    if problems:
        raise DemoError("; ".join(problems))
    print("\nThe demo shows what it promises: the loss fell, all lanes moved data, and both sides updated.")


def prepare_data(output: Path) -> None:
    """Write text, tokenizer and token files into `output`."""
    from examples.demo.tokenizer import train_tokenizer  # its library may be missing, which run_demo has reported

    say("collecting text from Python's standard library")
    num_documents, num_bytes = build_corpus(output / "text.jsonl")
    say(f"{num_documents} documents, {num_bytes / 1e6:.2f} MB of text")
    num_tokens = train_tokenizer(output / "text.jsonl", VOCAB_SIZE, output / "tokenizer")
    say(f"trained a byte-level BPE tokenizer with {num_tokens} tokens")
    run_and_keep(
        [sys.executable, "tools/preprocess_data.py", "--input", str(output / "text.jsonl"), "--append-eod"]
        + ["--output-prefix", str(output / "text"), "--workers", "2"]
        + tokenizer_flags(output),
        output / "preprocess.log",
    )


def tokenizer_flags(output: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(output / "tokenizer")]


def training_command(output: Path, iterations: int, extra: list[str]) -> list[str]:
    """Return the command line that a user would type; the last word on a flag wins, so `extra` comes last."""
    return [
        sys.executable,
        "pretrain_gpt.py",
        *shlex.split(MODEL),
        *shlex.split(SCHEDULE),
        *shlex.split(OFFLOAD),
        *("--train-iters", str(iterations)),
        *("--data-path", str(output / "text_text_document"), "--split", "95,5,0"),
        *tokenizer_flags(output),
        *("--offload-trace", str(output / "timeline.json")),
        *extra,
    ]


def run_and_keep(command: list[str], log: Path) -> None:
    """Run a command, show its output as it comes and keep it in `log`. Raises DemoError where it fails."""
    print(f"\n$ {shlex.join(['python', *command[1:]])}", flush=True)
    with log.open("w", encoding="utf-8") as kept:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
    if process.wait() != 0:
        raise DemoError(f"{command[1]} ended with code {process.returncode}, its last words are above and in {log}")


def draw(outcome: Outcome, log: Path, output: Path) -> None:
    """Write loss.png and timeline.png."""
    from tools.draw_timeline import draw_timeline, read_timeline
    from tools.plot_loss import draw_losses, read_losses

    losses = read_losses(log.read_text(encoding="utf-8"))
    draw_losses({"demo": losses}, output / "loss.png", "GPT of 10 M parameters, optimizer state offloaded")
    timeline = read_timeline(output / "timeline.json")
    draw_timeline(
        timeline, output / "timeline.png", f"One iteration: {outcome.num_subgroups} subgroups, updated on both sides"
    )


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
