"""Pretrain a GPT. `python pretrain_gpt.py --help` lists the settings; several ranks: `torchrun ... pretrain_gpt.py`."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import megatron

if TYPE_CHECKING:
    from megatron.training.config import CheckpointConfig

_FAULT, _USAGE = 1, 2  # of megatron/training/exit_codes.py, which may not be there
_SECONDS_TO_LEAVE = 30.0


def main() -> int:
    """Run the command line; returns the exit code, see docs/exit_codes.md."""
    try:
        _check_namespace()
    except ValueError as error:
        return _refuse(error)
    from megatron.training.exit_codes import code_of

    try:
        return _run()
    except Exception as error:  # noqa: BLE001 - the one place that turns exceptions into exit codes
        _leave_soon()
        if code_of(error) == _USAGE:
            return _refuse(error)
        traceback.print_exc()
        return _FAULT


def _run() -> int:
    from megatron.training.arguments import parse_args
    from megatron.training.launch import find_ranks
    from megatron.training.quiet import leave_out_known_warnings

    leave_out_known_warnings()
    ranks = find_ranks(os.environ)
    config = parse_args(sys.argv[1:], world_size=ranks.world_size, read_checkpoint_args=_saved_settings)
    if config.lifecycle.dry_run:
        from megatron.training.dry_run import dry_run

        report = dry_run(config)
        print("\n".join(report.lines), flush=True)
        return 0 if report.fits else _USAGE
    # After the settings: torch takes seconds to import, a mistyped flag should not.
    from megatron.training.training import pretrain

    return pretrain(config, ranks)


def _refuse(error: Exception) -> int:
    print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
    return _USAGE


def _saved_settings(checkpoint: CheckpointConfig) -> dict[str, object]:
    """Return the arguments of the checkpoint that --load names."""
    # Here, because it imports torch, which nothing else needs before the settings are known.
    from megatron.training.checkpointing import saved_settings

    return saved_settings(checkpoint)


def _check_namespace() -> None:
    """Refuse another package's `megatron.training` by name and place."""
    ours = Path(__file__).resolve().parent / "megatron" / "training"
    try:
        from megatron.training.namespace import check_namespace
    except ModuleNotFoundError:
        foreign = [Path(folder) / "training" for folder in megatron.__path__]
        found = next((str(folder) for folder in foreign if folder.is_dir()), "nowhere")
        raise ValueError(
            f"megatron.training is loaded from {found}, not from {ours}: put the repository first on PYTHONPATH, or "
            "install megatron-core>=0.16.1,<0.17, which has no package of that name"
        ) from None
    check_namespace(megatron.__path__)


def _leave_soon() -> None:
    """See that a failed process ends although its threads, or the communication library's, wait for other ranks."""
    timer = threading.Timer(_SECONDS_TO_LEAVE, os._exit, [_FAULT])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":  # checkpoint writers import this file again in their own process
    sys.exit(main())
