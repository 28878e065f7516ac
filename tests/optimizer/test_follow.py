"""Measured updates correct the rates that placed the state: for this run and the next start, and never by accident."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from follow_cases import MACHINE, paper_machine, wrong
from loop_cases import train

from deep_offload.model.cost import StateFormat, op_seconds
from deep_offload.model.hardware import profile_from_json
from deep_offload.model.machines import cache_file
from deep_offload.model.trace import Expectation
from deep_offload.optimizer import follow
from deep_offload.optimizer.follow import INTERVAL, NUM_UPDATES, PlacementFollower
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.placement import place_by_share
from deep_offload.plan.planner import build_plan
from deep_offload.runtime.measure import profile_for_run

LAYOUT = build_layout([ShardSpec(1 << 26, 2, 2)] * 26, 1 << 26)
STATE = StateFormat(True, "param")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path))
    return tmp_path


def paper_engine(believed=MACHINE, share=0.5):
    """What the follower sees of an engine; `truth` is the machine that it runs on."""
    placement = place_by_share(len(LAYOUT.subgroups), share)
    plan = build_plan(LAYOUT, placement, 4, op_seconds(LAYOUT, STATE, believed))
    expected = Expectation(plan, LAYOUT, STATE, believed, 1, 0.0, "cpu")
    expected = replace(expected, update_seconds=expected.timeline(0.2).in_place_seconds)
    engine = SimpleNamespace(
        expected=expected, layout=LAYOUT, plan=plan, settings=SimpleNamespace(placement=placement), truth=MACHINE
    )
    engine.finished_timeline = lambda: replace(engine.expected, profile=engine.truth).timeline(0.2)
    return engine


def drive(follower, num_updates):
    """As the optimizer between iterations; returns what `follow` returned, by update."""
    found = {}
    for _ in range(num_updates):
        follower.count_update()
        follower.look()
        if follower.is_due and (lines := follower.follow()):
            found[follower._num_updates] = lines
    return found


@pytest.mark.parametrize("cpu", [1.4, 0.7])
def test_a_contradicted_profile_is_corrected_at_once(cpu):
    """Ten updates of a machine that is not as it was measured: one line, a new prediction, and the next start's rates.

    Before, nothing is written; after, predictions hold, so that nothing more is said.
    """
    lines = []
    engine = paper_engine(wrong(MACHINE, cpu=cpu), share=0.2)
    believed = engine.expected
    follower = PlacementFollower(engine, lines.append)
    assert drive(follower, NUM_UPDATES - 1) == {} and not cache_file(MACHINE.fingerprint).exists()
    found = drive(follower, 1)
    measured = engine.finished_timeline().in_place_seconds
    assert list(found) == [NUM_UPDATES] and found[NUM_UPDATES][1] == lines[0] and len(lines) == 1
    assert f"updates take {measured * 1e3:.0f} ms where {believed.update_seconds * 1e3:.0f} ms were" in lines[0]
    assert "CPU updates run at" in lines[0] and lines[0].endswith("the next start on this machine goes by them")
    assert engine.expected.update_seconds == pytest.approx(measured, rel=0.03)
    kept = profile_from_json(cache_file(MACHINE.fingerprint).read_text())
    assert kept == engine.expected.profile
    assert drive(follower, 3 * INTERVAL) == {} and len(lines) == 1


def test_the_next_start_goes_by_it():
    """What training measured is the profile that a start on the same machine takes from the cache."""
    engine = paper_engine(wrong(MACHINE, cpu=1.4))
    drive(PlacementFollower(engine, [].append), NUM_UPDATES)
    with mock.patch("deep_offload.runtime.measure.fingerprint", lambda *_unused: MACHINE.fingerprint):
        assert profile_for_run(None, None, 1) == engine.expected.profile


def test_a_profile_that_holds_says_nothing():
    """Predictions that hold are corrected silently, and no placement is told anew."""
    lines = []
    engine = paper_engine(wrong(MACHINE, cpu=1.02))
    assert drive(PlacementFollower(engine, lines.append), 5 * INTERVAL) == {} and lines == []
    assert engine.expected.update_seconds == pytest.approx(engine.finished_timeline().in_place_seconds, rel=0.01)


def test_a_machine_that_changes_is_followed():
    """A drift after the first correction is noticed at the next look, 100 updates later, and only where it is large."""
    lines = []
    engine = paper_engine()
    follower = PlacementFollower(engine, lines.append)
    assert drive(follower, NUM_UPDATES + 1) == {}
    engine.truth = wrong(MACHINE, cpu=0.97)
    assert drive(follower, INTERVAL) == {}
    engine.truth = wrong(MACHINE, cpu=0.6)
    found = drive(follower, 3 * INTERVAL)
    assert list(found) == [NUM_UPDATES + 2 * INTERVAL] and len(lines) == 1


def test_too_few_or_short_updates_prove_nothing():
    """Skipped steps leave no timeline; updates of milliseconds are made of overheads; another placement starts anew."""
    engine = paper_engine(wrong(MACHINE, cpu=1.4))
    engine.finished_timeline = lambda: None
    assert drive(PlacementFollower(engine, pytest.fail), NUM_UPDATES) == {}
    engine = paper_engine(wrong(MACHINE, cpu=1.4))
    with mock.patch.object(follow, "SHORTEST_SECONDS", 9.0):
        assert drive(PlacementFollower(engine, pytest.fail), NUM_UPDATES) == {}
    assert not cache_file(MACHINE.fingerprint).exists()


def test_without_a_gpu_nothing_is_believed():
    """On the CPU alone lanes and compute share the cores: nothing is read, written or said."""
    engine = paper_engine(replace(wrong(MACHINE, cpu=1.4), num_gpus=0))
    engine.finished_timeline = pytest.fail
    follower = PlacementFollower(engine, pytest.fail)
    assert drive(follower, 2 * INTERVAL) == {} and not cache_file(MACHINE.fingerprint).exists()
    engine.expected = None
    assert drive(follower, 2 * INTERVAL) == {}


COMMON = "--bf16 --grad-reduce-in-bf16 --train-iters 14"


def test_the_loop_feeds_it(cache):
    """A real run, measured as another machine, tells it once and leaves that machine's rates for the next start."""
    seen = []
    with paper_machine(MACHINE, wrong(MACHINE, cpu=1.5)):
        got = train(
            f"{COMMON} --offload-gpu-share 0.25", before_step=lambda optimizer: seen.append(optimizer.describe())
        )
    assert got.text.count("were predicted: CPU updates run at") == 1
    assert [lines == seen[0] for lines in seen] == [True] * NUM_UPDATES + [False] * 4
    assert cache_file(MACHINE.fingerprint).exists()
