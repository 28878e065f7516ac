"""Profiles: JSON there and back, one sentence for each thing that can be wrong, and built-in ones that make sense."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings

from deep_offload.model.hardware import HardwareProfile, profile_from_json, profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES, cache_file, has_bf16, load_profile, planning_profile
from tests.plan.strategies import profiles

H200 = BUILT_IN_PROFILES["h200"]


@settings(max_examples=20)
@given(profiles())
def test_json_there_and_back(profile):
    """A profile read from its own text is equal, every digit of every rate included."""
    assert profile_from_json(profile_to_json(profile)) == profile


def text_with(**changes: object) -> str:
    values = {**json.loads(profile_to_json(H200)), **changes}
    return json.dumps({name: value for name, value in values.items() if value is not ...})


WRONG = [
    (text_with(h2d_bytes_per_s=...), "lacks the field h2d_bytes_per_s: measure a new one"),
    (
        text_with(dram_bytes_per_s=-1.0),
        "dram_bytes_per_s of hardware profile 'h200' is -1.0, it must be a number, more",
    ),
    (text_with(dram_bytes_per_s=0), "must be a number, more than 0"),
    (text_with(num_cores=1.5), "num_cores .* is 1.5"),
    (text_with(d2h_bytes_per_s="fast"), "d2h_bytes_per_s .* is 'fast'"),
    (text_with(gpu_adam_params_per_s=True), "gpu_adam_params_per_s .* is True"),
    (text_with(is_estimate=0), "is_estimate .* is 0, expected bool"),
    (text_with(date=None), "date .* is None, expected str"),
    (text_with(h2d_byte_per_s=1.0), "has an unknown field h2d_byte_per_s, did you mean h2d_bytes_per_s"),
    (text_with(format=7), "has format 7, this version reads 2"),
    (text_with(format=...), "has format None"),
    ("[1]", "holds a JSON list instead of an object"),
    ("{", "is no JSON"),
    (text_with(h2d_bytes_per_s=float("inf")), "h2d_bytes_per_s .* is inf"),
    (text_with(h2d_bytes_per_s=float("nan")), "h2d_bytes_per_s .* is nan"),
    (
        text_with(gpu_memory_bytes=10**400),
        "gpu_memory_bytes .* is 10000.*000, it must be a number, 0 or more and at most",
    ),
    (text_with(num_cores=-(10**400)), "num_cores .* is -1000.*000, it must be a number, more than 0 and at most"),
    (text_with(name=["x"] * 1000), r"name of hardware profile \['x', .*\.\.\.\] is .* expected str"),
    (text_with(num_cores=...)[:-1] + ', "num_cores": ' + "9" * 5000 + "}", "the file is no JSON that can be read"),
    ("[" * 100_000, "the file is no JSON that can be read"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_files_get_one_sentence(text, message):
    """Missing, negative, mistyped and unknown fields are named, with what to do."""
    with pytest.raises(ValueError, match=message) as error:
        profile_from_json(text, "the file")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("name", BUILT_IN_PROFILES)
def test_built_in_profiles_are_sound(name):
    """No lane is faster in company than alone, the host has at least one rank's memory rate, the source is told."""
    p = BUILT_IN_PROFILES[name]
    assert p.name == name and p.source and p.date and not p.fingerprint
    assert p.h2d_busy_bytes_per_s <= p.h2d_both_bytes_per_s <= p.h2d_bytes_per_s
    assert p.d2h_busy_bytes_per_s <= p.d2h_both_bytes_per_s <= p.d2h_bytes_per_s
    for wire in ("fp32", "param"):
        assert p.cpu_adam_params_per_s(wire, busy=True) <= p.cpu_adam_params_per_s(wire, busy=False)
    assert p.host_dram_bytes_per_s >= p.dram_bytes_per_s
    assert p.rank_dram_bytes_per_s(max(1, p.num_gpus)) <= p.dram_bytes_per_s
    assert p.is_estimate == ("estimate" in p.source)


def test_estimates_are_marked():
    """What nobody measured here or elsewhere says so."""
    assert {n for n, p in BUILT_IN_PROFILES.items() if p.is_estimate} == {"v100x8", "h100x8", "gh200", "gb200"}


def test_scaled():
    """Scaling multiplies every rate, divides the overhead and leaves sizes alone."""
    twice, once = asdict(H200.scaled(2.0)), asdict(H200)
    for name, value in once.items():
        factor = 2.0 if name.endswith("_per_s") else 0.5 if name == "op_overhead_seconds" else None
        assert twice[name] == (value if factor is None else value * factor)


def test_load_by_name_file_and_nonsense(tmp_path):
    """A built-in name, a file, and a sentence that lists the names for anything else."""
    assert load_profile("h100x4") is BUILT_IN_PROFILES["h100x4"]
    path = tmp_path / "mine.json"
    path.write_text(profile_to_json(replace(H200, name="mine")))
    assert load_profile(str(path)).name == "mine"
    with pytest.raises(ValueError, match="'nothing' cannot be read .*h200, h200x2, h100x4"):
        load_profile("nothing")
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"mine\.json' cannot be read \(it is no text\): give a file, or one of"):
        load_profile(str(path))


def test_planning_takes_the_newest_measured_profile(tmp_path, monkeypatch):
    """Given, else the newest readable file of the cache with a GPU, else the built-in one with advice to measure."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path))
    profile, note = planning_profile(None)
    assert profile is H200 and "calibrate" in note
    (tmp_path / "profile-broken.json").write_text("{")
    (tmp_path / "profile-binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "profile-nested.json").write_text("[" * 100_000)
    (tmp_path / "profile-digits.json").write_text("9" * 5000)
    (tmp_path / "profile-large.json").write_text(text_with(gpu_memory_bytes=10**400))
    (tmp_path / "profile-gone.json").symlink_to(tmp_path / "gone")
    cpu = replace(H200, name="cpu", num_gpus=0, gpu_memory_bytes=0)
    cache_file("cpu").write_text(profile_to_json(cpu))
    profile, note = planning_profile(None)
    assert profile is H200 and "only machines without a GPU were measured" in note
    cache_file("here").write_text(profile_to_json(replace(H200, name="here", fingerprint="an Intel / 16 cores")))
    os.utime(cache_file("here"), (1, 1))
    profile, note = planning_profile(None)
    assert profile.name == "here" and "measured before on here (an Intel / 16 cores)" in note and str(tmp_path) in note
    assert planning_profile("gh200")[0] is BUILT_IN_PROFILES["gh200"]


@pytest.mark.parametrize(
    ("name", "fingerprint", "has"),
    [
        ("v100x8", "", False),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / Tesla V100-SXM2-32GB 32 GiB x 8", False),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / NVIDIA A100 80 GiB x 8", True),
        ("v100-login", "Xeon / 8 cores / 1 x 7 threads / NVIDIA A100 80 GiB x 8", True),
        ("node7", "Xeon P100 / 8 cores / 1 x 7 threads / NVIDIA RTX A6000 48 GiB x 2", True),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / NVIDIA RTX 6000 Ada Generation 48 GiB x 2", True),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / Tesla T4 15 GiB x 1", False),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / NVIDIA T4 15 GiB x 1", False),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / Quadro RTX 6000 24 GiB x 1", False),
        ("node7", "Xeon / 8 cores / 1 x 7 threads / NVIDIA GeForce RTX 2080 Ti 11 GiB x 1", False),
        ("h200", "", True),
    ],
)
def test_gpus_without_bf16(name, fingerprint, has):
    """GPUs before Ampere are known by the measured GPU's name; only unmeasured ones by the profile's."""
    assert has_bf16(replace(H200, name=name, fingerprint=fingerprint)) is has


def test_cache_place(tmp_path, monkeypatch):
    """The cache follows DEEP_OFFLOAD_CACHE, then XDG_CACHE_HOME, then the home directory; machines do not collide."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "a"))
    assert cache_file("x").parent == tmp_path / "a" and cache_file("x") != cache_file("y")
    monkeypatch.delenv("DEEP_OFFLOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_file("x").parent == tmp_path / "b" / "deep_offload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file("x").parent == tmp_path / ".cache" / "deep_offload"


def test_a_profile_is_frozen():
    """Nothing changes a profile after it was checked."""
    with pytest.raises(AttributeError):
        HardwareProfile.__setattr__(H200, "name", "other")
