"""Profiles that measured updates contradict are measured again at the next start, and only those."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_cases import train

from deep_offload.model.machines import cache_file
from deep_offload.model.trace import UpdateFacts
from deep_offload.optimizer import drift
from deep_offload.optimizer.drift import NUM_UPDATES, ProfileDrift


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """What a real optimizer was placed by; its profile is the only one in the cache."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path))
    seen = []
    train(
        "--bf16 --offload-resident-fraction 0 --offload-gpu-share 0.5 --train-iters 1",
        before_step=lambda optimizer: seen.append(optimizer.expected),
    )
    assert cache_file(seen[0].profile.fingerprint).exists()
    return replace(seen[0], update_seconds=1.0, profile=replace(seen[0].profile, num_gpus=1))


def lines_after(expected, seconds):
    lines = []
    watch = ProfileDrift(expected, lines.append)
    for one in seconds:
        watch.add(UpdateFacts(one, 1.0, "cpu", {}, 1.0, one))
    return lines


@pytest.mark.parametrize("seconds", [2.0, 0.5])
def test_contradicted_profile_is_forgotten_once(expected, seconds):
    """Updates twice as long or as short get one line, and the cached profile is gone."""
    lines = lines_after(expected, [seconds] * 3 * NUM_UPDATES)
    assert len(lines) == 1 and f"updates take {seconds * 1e3:.0f} ms where 1000 ms were predicted" in lines[0]
    assert lines[0].endswith("the next start on this machine measures again")
    assert not cache_file(expected.profile.fingerprint).exists()
    again = lines_after(expected, [seconds] * NUM_UPDATES)
    assert again[0].endswith("measure again with `python -m deep_offload calibrate`")


@pytest.mark.parametrize(
    "seconds", [[1.2] * NUM_UPDATES, [0.8] * NUM_UPDATES, [1.0] * (NUM_UPDATES - 2) + [9.0, 9.0], [5.0] * 3]
)
def test_profile_that_holds_is_kept(expected, seconds):
    """Small differences, single slow updates and too few updates prove nothing."""
    assert lines_after(expected, seconds) == []
    assert cache_file(expected.profile.fingerprint).exists()


def test_short_updates_prove_nothing(expected):
    """Updates of milliseconds are made of overheads."""
    assert lines_after(replace(expected, update_seconds=0.01), [0.05] * NUM_UPDATES) == []


def test_without_a_gpu_nothing_is_said(expected):
    """On the CPU alone lanes and compute share the cores, and a profile would be measured again in vain."""
    on_cpu = replace(expected, profile=replace(expected.profile, num_gpus=0))
    assert lines_after(on_cpu, [5.0] * NUM_UPDATES) == []
    assert cache_file(expected.profile.fingerprint).exists()


def test_the_loop_feeds_it(tmp_path, monkeypatch):
    """A real run, its profile said to be a GPU's, adds each update and forgets the profile."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(drift, "SHORTEST_SECONDS", 0.0)
    monkeypatch.setattr(drift, "TOLERANCE", 1.0)
    seen = []

    def before(optimizer):
        if not seen:
            expected = optimizer._drift._expected
            optimizer._drift._expected = replace(expected, profile=replace(expected.profile, num_gpus=1))
            seen.append(optimizer)
        optimizer.last_step_fields()

    train("--bf16 --offload-resident-fraction 0 --offload-gpu-share 0.5 --train-iters 14", before_step=before)
    assert len(seen[0]._drift._seconds) == NUM_UPDATES and not list(tmp_path.glob("profile-*.json"))
