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
from residency_cases import counts

from deep_offload.model.choose import Compute
from deep_offload.model.cost import StateFormat, op_seconds
from deep_offload.model.hardware import profile_from_json
from deep_offload.model.machines import cache_file
from deep_offload.model.trace import Expectation
from deep_offload.optimizer import build, follow
from deep_offload.optimizer.follow import INTERVAL, NUM_UPDATES, PlacementFollower
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.placement import place_by_share
from deep_offload.plan.planner import build_plan
from deep_offload.report_run import read_run
from deep_offload.runtime import moves
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
    expected = replace(expected, update_seconds=expected.timeline(Compute(0.0, 0.2)).in_place_seconds)
    engine = SimpleNamespace(
        expected=expected, layout=LAYOUT, plan=plan, settings=SimpleNamespace(placement=placement), truth=MACHINE
    )
    engine.finished_timeline = lambda: replace(engine.expected, profile=engine.truth).timeline(Compute(0.0, 0.2))
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
    follower = PlacementFollower(engine, lines.append, may_move=False)
    assert drive(follower, NUM_UPDATES - 1) == {} and not cache_file(MACHINE.fingerprint).exists()
    found = drive(follower, 1)
    measured = engine.finished_timeline().in_place_seconds
    assert list(found) == [NUM_UPDATES] and found[NUM_UPDATES][1] == lines[0] and len(lines) == 1
    assert f"updates take {measured * 1e3:.0f} ms where {believed.update_seconds * 1e3:.0f} ms were" in lines[0]
    assert "CPU updates run at" in lines[0] and lines[0].endswith("the next start on this machine goes by these rates")
    assert engine.expected.update_seconds == pytest.approx(measured, rel=0.03)
    kept = profile_from_json(cache_file(MACHINE.fingerprint).read_text())
    assert kept == engine.expected.profile
    assert drive(follower, 3 * INTERVAL) == {} and len(lines) == 1


def test_the_next_start_goes_by_it():
    """What training measured is the profile that a start on the same machine takes from the cache."""
    engine = paper_engine(wrong(MACHINE, cpu=1.4))
    drive(PlacementFollower(engine, [].append, may_move=False), NUM_UPDATES)
    with mock.patch("deep_offload.runtime.measure.fingerprint", lambda *_unused: MACHINE.fingerprint):
        assert profile_for_run(None, None, 1) == engine.expected.profile


def test_a_profile_that_holds_says_nothing():
    """Predictions that hold leave the rates as they were measured; what is a little off is corrected silently."""
    lines = []
    engine = paper_engine(wrong(MACHINE, cpu=1.05))
    believed = engine.expected
    assert believed.update_seconds == pytest.approx(engine.finished_timeline().in_place_seconds, rel=0.05)
    assert drive(PlacementFollower(engine, lines.append, may_move=False), 5 * INTERVAL) == {} and lines == []
    assert engine.expected is believed and not cache_file(MACHINE.fingerprint).exists()
    engine = paper_engine(wrong(MACHINE, cpu=1.12), share=0.2)
    believed, measured = engine.expected.update_seconds, engine.finished_timeline().in_place_seconds
    assert 1.05 < measured / believed < 1.1
    assert drive(PlacementFollower(engine, lines.append, may_move=False), 5 * INTERVAL) == {} and lines == []
    assert engine.expected.update_seconds == pytest.approx(measured, rel=0.02)


def test_other_compute_than_assumed_corrects_no_rate():
    """A backward pass longer than assumed, which hides all gradients' flushes, makes the update shorter; rates hold."""
    engine = paper_engine(share=0.2)
    hurried = engine.expected.timeline(Compute(0.0, 0.01)).in_place_seconds
    engine.expected = believed = replace(engine.expected, update_seconds=hurried)
    assert hurried > 1.05 * engine.finished_timeline().in_place_seconds
    assert drive(PlacementFollower(engine, pytest.fail, may_move=True), 3 * INTERVAL) == {}
    assert engine.expected is believed and not cache_file(MACHINE.fingerprint).exists()


def test_a_machine_that_changes_is_followed():
    """A drift after the first correction is noticed at the next look, 100 updates later, and only where it is large."""
    lines = []
    engine = paper_engine()
    follower = PlacementFollower(engine, lines.append, may_move=False)
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
    assert drive(PlacementFollower(engine, pytest.fail, may_move=False), NUM_UPDATES) == {}
    engine = paper_engine(wrong(MACHINE, cpu=1.4))
    with mock.patch.object(follow, "SHORTEST_SECONDS", 9.0):
        assert drive(PlacementFollower(engine, pytest.fail, may_move=False), NUM_UPDATES) == {}
    assert not cache_file(MACHINE.fingerprint).exists()


def test_without_a_gpu_nothing_is_believed():
    """On the CPU alone lanes and compute share the cores: nothing is read, written or said."""
    engine = paper_engine(replace(wrong(MACHINE, cpu=1.4), num_gpus=0))
    engine.finished_timeline = pytest.fail
    follower = PlacementFollower(engine, pytest.fail, may_move=False)
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


# -- moves through the training loop ----------------------------------------------------------------------------------

LOOP = "--grad-reduce-in-bf16 --train-iters 14 --global-batch-size 4"  # four micro-batches
FEW_CPU, MANY_CPU = dict(cpu=0.5, up=1.3, down=1.3), dict(cpu=2.0, up=0.6, down=0.6)
"""Beliefs by which too little, and too much, is left to the CPU."""


def run(flags, believed, truth=MACHINE):
    """Train; returns the result, and (counts, traffic, host bytes, lines) at each step."""
    seen = []

    def after(optimizer, _norm):
        optimizer.synchronize()
        engine = optimizer._engine
        memory = engine.host_bytes, engine.settings.reserved
        seen.append((counts(engine), optimizer.traffic(), *memory, optimizer.describe(), optimizer.expected))

    with paper_machine(truth, believed):
        return train(flags, after_step=after), seen


TYPES = {
    "bf16": "--bf16 --grad-reduce-in-bf16",
    "bf16 full": "--bf16 --grad-reduce-in-bf16 --offload-split-master off --offload-grad-wire fp32",
    "bf16 fp32 gradients": "--bf16",
    "fp32": "",
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("off", [FEW_CPU, MANY_CPU], ids=["down", "up"])
def test_moves_keep_the_digest(kind, off):
    """The share changes after ten updates, downward into the reserve and upward without one; the digest is that of the
    all-resident run, the traffic that of the new placement."""
    flags = f"{TYPES[kind]} --train-iters 14 --global-batch-size 4 --offload-verify-interval 1"
    got, seen = run(flags, wrong(MACHINE, **off))
    want = train(f"{flags} --offload-resident-fraction 1")
    assert got.digest == want.digest and got.losses == want.losses
    first, last = seen[0][0], seen[-1][0]
    assert [entry[0] for entry in seen] == [first] * NUM_UPDATES + [last] * 4
    assert (last["gpu"] < first["gpu"]) if off is FEW_CPU else (last["gpu"] > first["gpu"])
    assert got.text.count(f"placement changed after {NUM_UPDATES} updates: GPU share ") == 1
    assert f"{last['gpu']} streamed" in seen[-1][4][0] and "placement changed" in seen[-1][4][1]
    assert seen[0][2] == seen[-1][2], "host memory stays as it is"
    cpu = [seen[i][1]["cpu_params"] - seen[i - 1][1]["cpu_params"] for i in (9, 10, 13)]
    assert cpu[1] == cpu[2] and (cpu[1] > cpu[0] if off is FEW_CPU else cpu[1] < cpu[0])
    assert seen[-1][5].plan.placement != seen[0][5].plan.placement and seen[-1][5].profile != seen[0][5].profile


def test_a_given_share_is_kept():
    """Nothing moves, and nothing is reserved, where a flag gives share or stride."""
    for flag in ("--offload-gpu-share 0.5", "--offload-stride 2"):
        got, seen = run(f"--bf16 {LOOP} {flag}", wrong(MACHINE, **FEW_CPU))
        assert "placement changed" not in got.text and seen[0][0] == seen[-1][0] and not seen[0][3]


def test_without_a_reserve_the_share_only_grows():
    """A host limit without room for more leaves the placement where it is, or lets it go up."""
    for off in (FEW_CPU, MANY_CPU):
        _, free = run(f"--bf16 {LOOP} --train-iters 1", wrong(MACHINE, **off))
        with mock.patch.object(build, "_host_limit", lambda *_unused, limit=free[0][2]: limit):
            got, seen = run(f"--bf16 {LOOP}", wrong(MACHINE, **off))
        assert free[0][3] and not seen[0][3] and seen[0][2] < free[0][2]
        assert "GiB of it reserved" not in got.text and seen[0][0] == free[0][0]
        is_up = seen[-1][0]["gpu"] > seen[0][0]["gpu"]
        assert is_up == (off is MANY_CPU) and (is_up or seen[-1][0] == seen[0][0])
        assert ("placement changed" in got.text) == is_up


def test_the_reserve_is_counted():
    """Host bytes of the run are those of the choice, its reserve included, which is told; none without a GPU."""
    choices = []
    settings = build._settings

    def look(choice, *rest):
        choices.append(choice)
        return settings(choice, *rest)

    with mock.patch.object(build, "_settings", look):
        got, seen = run(f"--bf16 {LOOP}", wrong(MACHINE, **FEW_CPU))
        _, on_cpu = run(f"--bf16 {LOOP}", replace(MACHINE, num_gpus=0))
    assert choices[0].host_bytes.total == seen[0][2] and choices[0].host_bytes.reserve > 0
    assert "of it reserved for a lower GPU share" in got.text
    assert choices[0].reserved == seen[0][3] and len(choices[0].reserved) == len(choices[0].placement) // 8
    assert choices[1].host_bytes.reserve == 0 and not on_cpu[0][3] and on_cpu[0][2] == choices[1].host_bytes.total


def test_after_a_checkpoint(tmp_path):
    """A checkpoint of moved subgroups loads under another placement, whose own ten updates move again."""
    flags = f"--bf16 {LOOP} --train-iters 26 --save {tmp_path} --save-interval 13"
    first, _ = run(f"{flags} --exit-interval 13", wrong(MACHINE, **FEW_CPU))
    again, seen = run(f"{flags} --load {tmp_path}", wrong(MACHINE, **MANY_CPU))
    want = train(f"--bf16 {LOOP} --train-iters 26 --offload-resident-fraction 1")
    assert "placement changed" in first.text and "placement changed" in again.text and len(seen) == 13
    assert again.digest == want.digest


def test_a_move_that_loses_masters_is_noticed():
    """The digest differs where a split master is not joined on its way to the CPU."""
    want = train(f"--bf16 {LOOP} --offload-resident-fraction 1")
    with mock.patch.object(moves, "_join", lambda *_unused: None):
        got, _ = run(f"--bf16 {LOOP}", wrong(MACHINE, **FEW_CPU))
    assert "placement changed" in got.text and got.digest != want.digest


def test_the_record_has_the_move(tmp_path):
    """A run's record holds placement, prediction and line from the step on that they hold for."""
    run(f"--bf16 {LOOP} --run-dir {tmp_path / 'run'}", wrong(MACHINE, **FEW_CPU))
    placed = read_run(tmp_path / "run").placed
    assert placed["event"] == "placement" and placed["iteration"] == NUM_UPDATES + 1
    assert any("placement changed after 10 updates" in line for line in placed["placement"])
    assert placed["predicted"]["profile_source"].split(", ")[-2] == "measured by 10 updates of training"
