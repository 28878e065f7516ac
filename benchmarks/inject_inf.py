"""pretrain_gpt.py with one gradient element made infinite in one step, which every placement must skip alike.

    python -m benchmarks.inject_inf NUMBER [words of pretrain_gpt.py]

The element is the first of the first parameter, in backward pass NUMBER (from 1; one per micro-batch).
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

import pretrain_gpt
from megatron.training import training


class Injection:
    """Poisons the gradient of one parameter in one backward pass."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._seen = 0

    @property
    def is_done(self) -> bool:
        """Whether the gradient was poisoned."""
        return self._seen >= self._number

    def build_model(self, *arguments: Any, **names: Any) -> list[Any]:
        """Build the model chunks as training does, and watch their first parameter."""
        chunks = _BUILD_MODEL(*arguments, **names)
        next(chunks[0].parameters()).register_hook(self._poison)
        return chunks

    def _poison(self, grad: torch.Tensor) -> torch.Tensor | None:
        self._seen += 1
        if self._seen != self._number:
            return None
        poisoned = grad.clone()
        poisoned.view(-1)[0] = torch.inf
        return poisoned


_BUILD_MODEL = training.build_model


def main() -> int:
    injection = Injection(int(sys.argv[1]))
    sys.argv = ["pretrain_gpt.py", *sys.argv[2:]]
    with mock.patch.object(training, "build_model", injection.build_model):
        code = pretrain_gpt.main()
    if code == 0 and not injection.is_done:
        print("no gradient was made infinite: that backward pass is beyond the run's end", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
