"""The exit codes of `pretrain_gpt.py`, and whose fault an exception is. Standard library only."""

from __future__ import annotations

FINISHED = 0
"""Also a stop on request: SAVE/status tells them apart."""

FAULT = 1
"""A fault of the run."""

USAGE = 2
"""Settings or data that cannot work."""

DISAMBIGUATE = 16
"""A result that cannot be right came twice: resume on another GPU to tell a faulty one from bad data."""

INVALID_RESULT = 17
"""A result that cannot be right, with a verdict on its cause."""

_OURS = ("megatron.training", "deep_offload", "__main__")


def code_of(error: BaseException) -> int:
    """Return `USAGE` for a ValueError that our own code raised, which is one sentence for the user, else `FAULT`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return USAGE if isinstance(error, ValueError) and name.startswith(_OURS) else FAULT
