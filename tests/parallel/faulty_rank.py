"""`pretrain_gpt.py` in which rank 1 raises, or is killed, in its third step; FAULT says which, FAULT_TIME is a file."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, REPOSITORY)

import pretrain_gpt  # noqa: E402
from megatron.training import trainer  # noqa: E402

_step, _calls = trainer.train_step, []


def faulty_step(*arguments: Any) -> Any:
    """The third one of rank 1 does not end well."""
    _calls.append(None)
    if len(_calls) == 3 and os.environ["RANK"] == "1":
        Path(os.environ["FAULT_TIME"]).write_text(repr(time.time()))
        if os.environ["FAULT"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a planted fault")
    return _step(*arguments)


if __name__ == "__main__":
    trainer.train_step = faulty_step
    sys.exit(pretrain_gpt.main())
