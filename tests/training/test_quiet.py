"""What megatron-core and torch say that nobody could act on is left out, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megatron.training.quiet import leave_out_known_warnings
from tests.training.runs import TINY

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(240)

LEFT_OUT = [
    ("megatron.core.optimizer", "Transformer Engine and Apex are not installed. Falling back to Torch optimizers."),
    ("megatron.core.models.backends", "Apex is not installed. Falling back to Torch Norm"),
    ("torch.distributed.c10d_logger", "barrier(): using the device under current context. You can specify `device_id`"),
]
SHOWN = [
    ("megatron.core.optimizer", "Transformer Engine and Apex are of different versions."),
    ("megatron.core.optimizer", "the optimizer is slow because Apex is not installed. Falling back to Torch Norm"),
    ("their_model", "barrier(): using the device under current context."),
    ("their_model", "Apex is not installed. Falling back to Torch Norm"),
    ("megatron.training.model", "Transformer Engine and Apex are not installed. Falling back to nothing."),
]
# A user's own start script, whose warning must come through beside the ones that do not.
START = f"""
import sys, warnings
import pretrain_gpt
warnings.warn("a warning of the user's own")
sys.argv = ["pretrain_gpt.py", *"{TINY} --mock-data --train-iters 1".split()]
code = pretrain_gpt.main()
warnings.warn("another, after the run")
sys.exit(code)
"""


def shown(cases):
    """Return the texts that a process with our filters shows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        leave_out_known_warnings()
        for line, (module, text) in enumerate(cases):
            warnings.warn_explicit(text, UserWarning, f"{module}.py", line, module=module, registry={})
    return [str(warning.message) for warning in caught]


def test_only_known_texts_are_left_out():
    """They are left out where megatron-core or torch says them; other texts and other modules come through."""
    assert shown(LEFT_OUT + SHOWN) == [text for _, text in SHOWN]


def test_start_prints_none_and_shows_others():
    """A whole run says nothing of Apex or TransformerEngine on stderr, while the script's own warnings appear."""
    result = subprocess.run(
        [sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True, timeout=220, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "Warning: " in line]
    assert [line.split("Warning: ")[1] for line in lines] == ["a warning of the user's own", "another, after the run"]
    for word in ("Apex", "Transformer Engine"):
        assert word not in result.stderr and word not in result.stdout
