"""A GPT of at least 1 B parameters saved and resumed under another share: one digest, one loss curve, what it costs.

    python -m benchmarks.resume --output out/resume

Three runs of pretrain_gpt.py in deterministic mode: all iterations without a checkpoint; the first ones with a save at
their end; the others from that checkpoint, in a new process and with another part of the state updated on the GPU.
Prints seconds and memory of save and load. Ends with code 1 when losses or digests differ. The checkpoint, 14 bytes a
parameter, is deleted at the end.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.exactness import MODELS, TRAINING, data_flags


@dataclass(frozen=True, slots=True)
class Log:
    """What a run printed. losses and norms by iteration; digest: None where none was asked for."""

    losses: dict[int, tuple[str, str]]
    digest: str | None
    lines: tuple[str, ...]
    seconds: float


def train(name: str, arguments: list[str], output: Path) -> Log:
    """Run pretrain_gpt.py, keep its output. Raises RuntimeError with its last lines when it fails."""
    log, started = output / f"{name}.log", time.monotonic()
    with log.open("w") as out:
        code = subprocess.call([sys.executable, "pretrain_gpt.py", *arguments], stdout=out, stderr=subprocess.STDOUT)
    text = log.read_text()
    if code != 0:
        raise RuntimeError(f"pretrain_gpt.py ended with code {code}:\n" + "\n".join(text.splitlines()[-15:]))
    steps = re.findall(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)", text)
    digests = re.findall(r"^state digest: (\S+)", text, re.MULTILINE)
    wanted = ("saved checkpoint", "> loaded", "> memory", "> a checkpoint is about", "training stood still")
    lines = tuple(line for line in text.splitlines() if any(word in line for word in wanted))
    return Log(
        {int(number): (loss, norm) for number, loss, norm in steps},
        digests[-1] if digests else None,
        lines,
        time.monotonic() - started,
    )


def differences(whole: Log, first: Log, resumed: Log, saved: int) -> list[str]:
    """Return what is not bitwise equal, one sentence each."""
    found = []
    for name, log, numbers in (
        ("saving", first, [n for n in whole.losses if n <= saved]),
        ("resumed", resumed, [n for n in whole.losses if n > saved]),
    ):
        if sorted(log.losses) != numbers:
            found.append(f"the {name} run did iterations {sorted(log.losses)}, not {numbers}")
        found += [
            f"iteration {n} of the {name} run: loss and norm {log.losses[n]}, not {whole.losses[n]}"
            for n in numbers
            if log.losses.get(n, whole.losses[n]) != whole.losses[n]
        ]
    if resumed.digest is None or resumed.digest != whole.digest:
        found.append(f"the resumed run's digest is {resumed.digest}, not {whole.digest}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/resume"))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--save-at", type=int, default=6)
    parser.add_argument("--share", default="0.5", help="of the offloaded state that the GPU updates, before the save")
    parser.add_argument("--resume-share", default="0.25", help="the same, after it")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on generated tokens")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint")
    options = parser.parse_args()
    output, save = options.output, options.output / "checkpoint"
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(save, ignore_errors=True)
    data, model = data_flags(options), MODELS["tiny" if options.smoke else "1b"]
    training = TRAINING.replace("--log-state-digest ", "") + f" --train-iters {options.iterations} --lr-warmup-iters 2"
    # Dropout, so that random numbers must come back, too.
    model += " --hidden-dropout 0.1 --offload-resident-fraction 0"
    command = [*shlex.split(f"{model} {training}"), *data]
    before, after = ["--offload-gpu-share", options.share], ["--offload-gpu-share", options.resume_share]
    whole = train("whole", [*command, *before, "--log-state-digest"], output)
    saving = ["--save", str(save), "--save-interval", "100000", "--exit-interval", str(options.save_at)]
    first = train("first", [*command, *before, *saving], output)
    resumed = train("resumed", [*command, *after, "--load", str(save), "--log-state-digest"], output)
    for name, log in (("whole", whole), ("first", first), ("resumed", resumed)):
        print(f"{name}: {log.seconds:.1f} s of wall time")
        print("\n".join(f"  {line}" for line in log.lines))
    last = max(whole.losses)
    print(f"loss {whole.losses[1][0]} -> {whole.losses[last][0]}, {whole.digest}")
    found = differences(whole, first, resumed, options.save_at)
    shares = f"share {options.share}, then {options.resume_share}"
    print("\n".join(found) if found else f"one digest, one loss curve: saved at {options.save_at}, {shares}")
    if not options.keep:
        shutil.rmtree(save, ignore_errors=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
