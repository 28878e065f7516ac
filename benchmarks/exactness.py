"""One digest for every offload setting, on a GPT of at least 1 B parameters trained on real text.

    python -m benchmarks.exactness --output out/exactness [--iterations 50]

Trains the same model once for each setting through pretrain_gpt.py, in deterministic mode, and prints a table: digest,
last loss, median milliseconds of an iteration, peak memory. Ends with code 1 when digests or losses differ.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.demo.run import prepare_data, tokenizer_flags

MODEL_1B = (
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 4 --seq-length 2048 --max-position-embeddings 2048 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 2 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 10 --weight-decay 0.1 "
    "--adam-beta2 0.95 --clip-grad 1.0 --bf16 --grad-reduce-in-bf16 --recompute-granularity full --recompute-method "
    "uniform --recompute-num-layers 1 --deterministic-mode --log-interval 1 --eval-interval 100000 --eval-iters 0 "
    "--split 100,0,0 --log-state-digest --interleaved-offload --offload-grad-wire fp32"
)
SETTINGS = {
    "all resident": "--offload-resident-fraction 1",
    "share 0": "--offload-resident-fraction 0 --offload-gpu-share 0",
    "share 1/2": "--offload-resident-fraction 0 --offload-gpu-share 0.5",
    "share 1": "--offload-resident-fraction 0 --offload-gpu-share 1",
    "share auto": "--offload-resident-fraction 0",
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run printed."""

    losses: tuple[str, ...]
    digest: str
    milliseconds: float
    memory: str
    upcast_bytes: int
    placement: str


def train(arguments: list[str], log: Path) -> Run:
    """Run pretrain_gpt.py, keep its output in `log`. Raises RuntimeError with its last lines when it fails."""
    with log.open("w") as out:
        code = subprocess.call([sys.executable, "pretrain_gpt.py", *arguments], stdout=out, stderr=subprocess.STDOUT)
    text = log.read_text()
    if code != 0:
        raise RuntimeError(f"pretrain_gpt.py ended with code {code}:\n" + "\n".join(text.splitlines()[-15:]))
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    return Run(
        losses=tuple(re.findall(r"lm loss: (\S+)", text)),
        digest=re.findall(r"state digest: (\S+)", text)[-1],
        milliseconds=statistics.median(times[3:] or times),
        memory=re.findall(r"> memory: (.*)", text)[-1],
        upcast_bytes=int(re.findall(r"moved by lane upcast: .*\((\d+) bytes\)", text)[-1]),
        placement=re.findall(r"optimizer state: .*: (.*)", text)[0],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/exactness"))
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--model", default=MODEL_1B)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if not (options.output / "text_text_document.bin").exists():
        prepare_data(options.output)
    data = [*tokenizer_flags(options.output), "--data-path", str(options.output / "text_text_document")]
    runs: dict[str, Run] = {}
    for name in options.settings.split(","):
        command = [*shlex.split(options.model), *shlex.split(TRAINING), *data, "--train-iters", str(options.iterations)]
        log = options.output / f"{name.replace('/', '_').replace(' ', '_')}.log"
        runs[name] = run = train([*command, *shlex.split(SETTINGS[name])], log)
        print(
            f"{name}: loss {run.losses[0]} -> {run.losses[-1]}, {run.milliseconds:.1f} ms an iteration, {run.memory}, "
            f"upcast {run.upcast_bytes / 2**30:.2f} GiB, {run.placement}, {run.digest}",
            flush=True,
        )
    first = next(iter(runs.values()))
    equal = all(run.digest == first.digest and run.losses == first.losses for run in runs.values())
    print("one digest, one loss curve" if equal else "DIGESTS OR LOSSES DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
