"""The profile of this machine: measured in seconds, kept per machine, another machine's refused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from deep_offload.model.hardware import HardwareProfile, profile_from_json, profile_to_json  # noqa: E402
from deep_offload.model.machines import BUILT_IN_PROFILES, cache_file  # noqa: E402
from deep_offload.runtime import measure  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> HardwareProfile:
    return measure.measure_profile(CPU, 1)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """Replaces the measurement by a built-in profile with this machine's fingerprint; holds the calls."""
    calls: list[int] = []

    def fake(device, num_threads, num_ranks=1, *_unused):
        calls.append(num_ranks)
        machine = measure.fingerprint(device, num_threads, num_ranks)
        return replace(BUILT_IN_PROFILES["h200"], name="fake", fingerprint=machine)

    monkeypatch.setattr(measure, "measure_profile", fake)
    return calls


def test_a_measured_profile_is_sound(measured):
    """Every rate is there, lanes in company are no faster than alone, and memory carries what the lanes moved."""
    p = measured
    assert p.fingerprint == measure.fingerprint(CPU, 1) and p.num_gpus == 0 and not p.is_estimate
    assert p.h2d_busy_bytes_per_s <= p.h2d_both_bytes_per_s <= p.h2d_bytes_per_s
    assert p.d2h_busy_bytes_per_s <= p.d2h_both_bytes_per_s <= p.d2h_bytes_per_s
    for wire in ("fp32", "param"):
        busy, alone = (p.cpu_adam_params_per_s(wire, busy=busy) for busy in (True, False))
        assert 1e6 < busy <= alone < 1e12
        assert p.dram_bytes_per_s >= 28 * alone
    assert p.host_dram_bytes_per_s >= p.dram_bytes_per_s
    assert profile_from_json(profile_to_json(p)) == p


def test_what_measuring_holds_is_not_missed_later(monkeypatch):
    """Memory is read before the buffers are made, or the profile says that they are gone for good."""
    order = []
    limits, bench = measure.read_host_limits, measure.HostBench
    monkeypatch.setattr(measure, "read_host_limits", lambda: order.append("limits") or limits())
    monkeypatch.setattr(measure, "HostBench", lambda *words: order.append("buffers") or bench(*words))
    monkeypatch.setattr(measure, "_profile", lambda *words: None)
    measure.measure_profile(CPU, 1)
    assert order[:2] == ["limits", "buffers"]


@pytest.mark.parametrize(
    ("available", "ranks", "parts"), [(None, 8, 4), (128 << 30, 1, 4), (128 << 30, 8, 4), (24 << 30, 8, 1), (0, 1, 1)]
)
def test_buffers_take_a_quarter_of_the_memory_at_most(available, ranks, parts):
    """A part is 0.9 GiB a rank; one there must be."""
    assert measure.num_parts(available, ranks) == parts


def test_rates_are_medians_of_rounds(monkeypatch):
    """One round that met another job, or the first one of a process, does not count; host memory has what the lanes'
    medians take of it together, which no single round may have shown."""
    up, down, cpu, memory = (
        "h2d_busy_bytes_per_s",
        "d2h_busy_bytes_per_s",
        "cpu_adam_%s_busy_params_per_s",
        "dram_bytes_per_s",
    )
    rounds = [
        {up: u, down: 40.0, cpu % "fp32": c, cpu % "param": c, memory: m}
        for u, c, m in ((30.0, 1.0, 90.0), (20.0, 2.0, 100.0), (29.0, 1.8, 95.0))
    ]
    monkeypatch.setattr(measure, "_round_of_rates", lambda *_unused: rounds.pop(0))
    got = measure._lane_rates(SimpleNamespace(num_rounds=3, dram_bytes_per_copied_byte=1), 1, lambda: None)
    assert (got[up], got[cpu % "param"]) == (29.0, 1.8)
    assert got[memory] == 1.8 * 30 + 29.0 + 40.0


def test_rates_count_only_shared_time():
    """Loops that run together are counted over the time of the measurement, not over a slow loop's tail."""
    naps = {"short": 0.002, "long": 0.03}
    rates = measure._rates({name: lambda nap=nap: time.sleep(nap) for name, nap in naps.items()}, seconds=0.12)
    assert 100 < rates["short"] <= 1 / 0.002
    assert 10 < rates["long"] <= 1 / 0.03


def test_a_failing_loop_surfaces():
    """An error on a lane's thread ends the measurement and is raised here."""

    def fail() -> None:
        if threading_is_on():
            raise RuntimeError("the lane broke")

    def threading_is_on() -> bool:
        import threading

        return threading.current_thread() is not threading.main_thread()

    with pytest.raises(RuntimeError, match="the lane broke"):
        measure._rates({"lane": fail}, seconds=0.05)


def test_measured_once_then_cached(cache, counted):
    """The second call reads the file; another number of threads or ranks is another machine; it can be renewed."""
    lines: list[str] = []
    first = measure.profile_for_run(None, CPU, 1, log=lines.append)
    assert counted == [1] and "measured this machine" in lines[0]
    assert measure.profile_for_run(None, CPU, 1) == first and counted == [1]
    measure.profile_for_run(None, CPU, 2)
    measure.profile_for_run(None, CPU, 1, num_ranks=2)
    assert counted == [1, 1, 2] and len(list(cache.iterdir())) == 3
    measure.profile_for_run(None, CPU, 1, remeasure=True)
    assert counted == [1, 1, 2, 1]


@pytest.mark.parametrize("damage", ["{", "another machine"])
def test_bad_cache_files_are_measured_again(cache, counted, damage):
    """A broken file, or one that another machine left, is replaced with one line in the log."""
    path = cache_file(measure.fingerprint(CPU, 1))
    path.parent.mkdir()
    path.write_text(damage if damage == "{" else profile_to_json(BUILT_IN_PROFILES["h200"]))
    lines: list[str] = []
    profile = measure.profile_for_run(None, CPU, 1, log=lines.append)
    assert "measuring again" in lines[0] and counted == [1]
    assert profile_from_json(path.read_text()) == profile


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path, monkeypatch, counted):
    """Training goes on without a cache, and the log says how to give one."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "file"))
    lines: list[str] = []
    assert measure.profile_for_run(None, CPU, 1, log=lines.append).name == "fake"
    assert any("set DEEP_OFFLOAD_CACHE" in line for line in lines)


def test_given_profiles(tmp_path, cache, counted):
    """A given file of this machine is used; another machine's, a built-in and a missing one are refused."""
    mine = replace(BUILT_IN_PROFILES["h200"], fingerprint=measure.fingerprint(CPU, 1))
    path = tmp_path / "mine.json"
    path.write_text(profile_to_json(mine))
    assert measure.profile_for_run(str(path), CPU, 1) == mine and counted == []
    path.write_text(profile_to_json(replace(mine, fingerprint="a mainframe")))
    with pytest.raises(ValueError, match="was measured on another machine .a mainframe., this is .* leave it out"):
        measure.profile_for_run(str(path), CPU, 1)
    with pytest.raises(ValueError, match="h200 is a built-in profile"):
        measure.profile_for_run("h200", CPU, 1)
    with pytest.raises(ValueError, match="cannot be read"):
        measure.profile_for_run(str(tmp_path / "none.json"), CPU, 1)
    path.write_text("{}")
    with pytest.raises(ValueError, match="--offload-profile .*mine.json has format None"):
        measure.profile_for_run(str(path), CPU, 1)
