"""The global batch size over the run, as phases. Standard library only, numbers in, numbers out."""

from __future__ import annotations

Phase = tuple[int, int]
"""(samples consumed when it begins, samples of each step from then on)."""

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def constant_phases(global_batch_size: int) -> tuple[Phase, ...]:
    """Return the one phase of a batch that never changes."""
    return ((0, global_batch_size),)


def rampup_phases(start: int, increment: int, samples: int, global_batch_size: int) -> tuple[Phase, ...]:
    """Return the phases of --rampup-batch-size: equal shares of `samples` for each size below the global batch.

    Raises ValueError for sizes that never meet the global batch.
    """
    flags = f"--rampup-batch-size {start} {increment} {samples}"
    if min(start, increment) < 1 or samples < 0:
        raise ValueError(f"{flags} is not allowed: START and INCREMENT must be 1 or more, SAMPLES 0 or more")
    growth = global_batch_size - start
    if growth < 0 or growth % increment:
        raise ValueError(
            f"{flags} never becomes --global-batch-size {global_batch_size}: the global batch must be START plus a "
            "multiple of INCREMENT"
        )
    steps = growth // increment
    if steps == 0 or samples == 0:
        return constant_phases(global_batch_size)
    # Phase k begins at the first whole number of samples at or after k shares.
    return tuple((-(-k * samples // steps), start + k * increment) for k in range(steps + 1))


def step_phases(schedule: str, seq_length: int) -> tuple[Phase, ...]:
    """Return the phases of --step-batch-size-schedule, "TOKENS:BATCH TOKENS:BATCH ...", with K, M, B and T.

    Raises ValueError for anything else, and unless the first phase begins at 0 and later ones follow it.
    """
    message = (
        f"--step-batch-size-schedule is {schedule!r}, expected TOKENS:BATCH pairs that begin at 0 and grow, "
        'such as "0:16 2.4B:32"'
    )
    starts, phases = [], []
    for entry in schedule.strip("'\" ").replace(",", " ").split():
        tokens, colon, batch = entry.partition(":")
        if not colon:
            raise ValueError(message)
        starts.append(_number(tokens, message))
        phases.append((starts[-1] // seq_length, _number(batch, message)))
    if not phases or starts[0] != 0 or starts != sorted(set(starts)) or min(batch for _, batch in phases) < 1:
        raise ValueError(message)
    return tuple(phases)


def _number(text: str, message: str) -> int:
    text = text.upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise ValueError(message) from None


def batch_size_at(phases: tuple[Phase, ...], consumed_samples: int) -> int:
    """Return the samples of the step that begins after `consumed_samples`."""
    return next(batch for start, batch in reversed(phases) if consumed_samples >= start)


def samples_after(phases: tuple[Phase, ...], iterations: int) -> int:
    """Return the samples that the first `iterations` steps consume."""
    consumed = 0
    for (_, batch), end in zip(phases, [start for start, _ in phases[1:]] + [None]):
        steps = iterations if end is None else min(iterations, max(0, -(-(end - consumed) // batch)))
        consumed += steps * batch
        iterations -= steps
    return consumed


def iterations_within(phases: tuple[Phase, ...], samples: int) -> int:
    """Return the whole steps that `samples` samples are enough for."""
    consumed = iterations = 0
    for (_, batch), end in zip(phases, [start for start, _ in phases[1:]] + [None]):
        steps = max(0, samples - consumed) // batch
        if end is not None:
            steps = min(steps, max(0, -(-(end - consumed) // batch)))
        consumed += steps * batch
        iterations += steps
        if end is not None and consumed < end:
            break  # the next step of this phase would need more than is left
    return iterations
