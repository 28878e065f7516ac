"""The doctor on a machine with a GPU: what no other test can run."""

from __future__ import annotations

import json

import pytest
import torch

from deep_offload.cli import main
from deep_offload.runtime import probe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_links_and_profile_of_a_gpu(tmp_path, capsys, monkeypatch):
    """Each GPU's copies are measured, pinned ones are the fastest, and the profile is a GPU's."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--json", "--disk", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    gpus = found["facts"]["gpus"]
    assert len(gpus) == torch.cuda.device_count() == found["profile"]["num_gpus"]
    for gpu in gpus:
        assert gpu["pinned_h2d"] > 1e9 and gpu["pinned_d2h"] > 1e9
        assert gpu["pageable_d2h"] < 1.1 * gpu["pinned_d2h"]
        assert gpu["both_h2d"] + gpu["both_d2h"] > 1e9
    assert found["facts"]["triad_under_copies"] > 0
    assert found["seconds"] < 60


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_together():
    """All links at once and an all-reduce over them have rates."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    assert all(rate > 1e9 for rate in probe.copies_together(devices))
    assert probe.all_reduce_bytes_per_s(devices) > 1e8
