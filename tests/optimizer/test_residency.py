"""Subgroups that stay on the device from some step on keep every bit, and stop moving bytes."""

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import (
    ALL_RESIDENT,
    Case,
    assert_same_bits,
    bits,
    drive,
    make_model,
)
from loop_cases import COMMON as LOOP
from loop_cases import LLAMA_LIKE, train
from residency_cases import PLENTY, counts, device_of, paper_gpu

from deep_offload.model.dry_run import forecast
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.residency import working_bytes
from deep_offload.model.run import model_bytes
from deep_offload.optimizer import build
from deep_offload.optimizer.residency import NUM_STEPS, GpuMemory
from deep_offload.plan.layout import build_layout
from deep_offload.runtime.state import DeviceState
from megatron.training import training
from megatron.training.arguments import parse_args
from megatron.training.dry_run import run_shape

NUM_UPDATES = 10
TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, fp32 gradients": (torch.bfloat16, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
}


@pytest.fixture(scope="module", autouse=True)
def one_profile(tmp_path_factory):
    """Rates are measured once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def drive_growing(case, growth, look=None):
    """As `drive`, but before step s the first growth[s] subgroups become resident; look(step, engine) sees each."""

    def grow(step, engine):
        if step in growth:
            engine.keep_resident(min(growth[step], len(engine.layout.subgroups)))

    return drive(case, NUM_UPDATES, before=grow, after=look)


ALL = 1 << 30


@pytest.mark.parametrize("split", [True, False], ids=["split", "full"])
def test_planned_bytes_are_those_held(split):
    """On both sides before and after more became resident: host memory stays, device memory grows."""
    seen = []

    def look(step, engine):
        host, device = engine.planned_bytes
        assert host == engine.host_bytes, f"step {step}"
        rounding = device.resident + device.slots - engine.device_bytes
        assert 0 <= rounding <= 3 * 512 * (len(engine.layout.subgroups) + engine.num_slots), f"step {step}"
        seen.append((host, engine.device_bytes))

    drive_growing(Case(share=0.5, slots=3, split=split), {3: 4, 5: ALL}, look)
    assert len({host for host, _ in seen}) == 1 and len({device for _, device in seen}) == 3


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("wire", ["fp32", "param"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "full"])
def test_growing_residents_change_no_bit(kind, wire, split):
    """From all on the CPU, half streamed, all streamed or a part resident, to all resident at once or in three steps:
    weights, masters and moments are those of the all-resident run and of the run that stays as it is."""
    dtype, grad_dtype = TYPES[kind]
    common = dict(dtype=dtype, grad_dtype=grad_dtype, wire=wire, split=split, accumulation=2)
    want = drive(Case(**ALL_RESIDENT, **common), NUM_UPDATES)
    for place in (dict(share=0.0), dict(share=0.5), dict(share=1.0, slots=3), dict(share=0.5, resident=0.3)):
        case = Case(**place, **common)
        assert_same_bits(drive(case, NUM_UPDATES), want, f"{case} without growth")
        for growth in ({4: ALL}, {4: 9}, {2: 7, 4: 8, 8: ALL}, {1: ALL}):
            assert_same_bits(drive_growing(case, growth), want, f"{case} {growth}")


def test_a_state_that_is_not_copied_is_noticed():
    """The comparison fails where moments of new residents start from zero, or masters lose their low bits."""
    case = Case(share=0.5, accumulation=2)
    want, copy = drive(case, NUM_UPDATES), DeviceState._copy
    for forgotten in ("exp_avg", "exp_avg_sq", "master"):

        def without(self, plan, subgroup, home, forgotten=forgotten):
            arrays = copy(self, plan, subgroup, home)
            arrays[forgotten].zero_()
            return arrays

        with mock.patch.object(DeviceState, "_copy", without):
            got = drive_growing(case, {4: ALL})
        assert any(not torch.equal(bits(got[name]), bits(want[name])) for name in want), forgotten


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_residents_move_no_bytes(share):
    """Counters go on over the change: they grow by the same in each step before it, and not at all behind it."""
    seen = {}

    def look(step, engine):
        engine.synchronize()
        seen[step] = engine.traffic, engine.host_bytes, engine.device_bytes

    drive_growing(Case(share=share), {4: ALL}, look)
    first, third, last = (seen[step][0] for step in (2, 3, NUM_UPDATES))
    for lane in ("h2d_bytes", "d2h_bytes"):
        assert third[lane] > first[lane] > 0
        assert last[lane] == third[lane] == seen[4][0][lane]
    assert last["cpu_params"] == third["cpu_params"]
    per_step = sum(third[name] for name in ("cpu_params", "gpu_params")) // 3
    assert last["gpu_params"] - third["gpu_params"] == per_step * (NUM_UPDATES - 3)
    assert seen[NUM_UPDATES][1] == seen[3][1], "host memory stays allocated"
    assert seen[NUM_UPDATES][2] == 10 * per_step, "no slots are left: two moments and 16 bits of the master"


def test_some_residents_move_fewer_bytes_and_keep_their_slots():
    """Slots stay as long as so many subgroups are streamed; each subgroup that stays moves nothing more."""
    slots = {}

    def look(step, engine):
        engine.synchronize()
        slots[step] = len(engine._device_state.slots), engine.traffic["h2d_bytes"]

    case = Case(share=1.0, slots=3)
    num = len(build_layout([shard.spec for shard in make_model(case).shards], case.subgroup).subgroups)
    drive_growing(case, {4: num - 4, 6: num - 2, 8: num}, look)
    assert [slots[step][0] for step in (3, 4, 6, 8)] == [3, 3, 2, 0]
    moved = [slots[step][1] - slots[step - 1][1] for step in (3, 5, 7, 9)]
    assert moved[0] > moved[1] > moved[2] > moved[3] == 0


@pytest.mark.parametrize("room", [0, 20_000])
def test_no_memory_for_them_changes_nothing(room):
    """Where the device has no room, at once or half way, the engine says so and goes on with the same bits."""
    case = Case(share=0.5)
    want, before = drive(case, NUM_UPDATES), []

    def look(step, engine):
        if step == 3:
            before.append((engine.settings, engine.plan, engine.device_bytes))
            with device_of(room), pytest.raises(torch.OutOfMemoryError):
                engine.keep_resident(len(engine.layout.subgroups))
            assert (engine.settings, engine.plan, engine.device_bytes) == before[0]

    assert_same_bits(drive_growing(case, {}, look), want, "after a refusal")


def test_figures_of_a_reading():
    """What may be allocated counts the allocator's own reserve; room at the peak leaves out 5 % and others' memory."""
    memory = GpuMemory(free=300, total=1000, reserved=600, allocated=450, peak=550)
    assert memory.available == 450
    assert memory.headroom == 950 - 100 - 550


# -- through the training loop --------------------------------------------------------------------------------------

COMMON = "--bf16 --grad-reduce-in-bf16 --global-batch-size 4 --train-iters 8"
AUTO = "--offload-resident-fraction auto"


@pytest.fixture(scope="module")
def resident_run_and_expectation():
    expected = []
    run = train(
        f"{COMMON} --offload-resident-fraction 1", before_step=lambda optimizer: expected.append(optimizer.expected)
    )
    return run, expected[0]


@pytest.fixture(scope="module")
def resident_run(resident_run_and_expectation):
    return resident_run_and_expectation[0]


@pytest.fixture(scope="module")
def expected_of_residents(resident_run_and_expectation):
    return resident_run_and_expectation[1]


@pytest.mark.parametrize("share", ["0", "0.5", "1"])
def test_loop_grows_after_three_steps(share, resident_run, expected_of_residents):
    """Nothing fits by the estimate, all by the measured peak: the digest of all and of none resident, one line in the
    log, a new expectation, and no byte over the link from the fourth step on."""
    seen, traffic = [], []

    def before(optimizer):
        seen.append((counts(optimizer._engine), optimizer.expected, optimizer.describe()))

    def after(optimizer, _norm):
        optimizer.synchronize()
        traffic.append(optimizer.traffic())

    flags = f"{COMMON} --offload-gpu-share {share}"
    with paper_gpu(1, PLENTY):
        got = train(f"{flags} {AUTO} --offload-verify-interval 1", before_step=before, after_step=after)
    none = train(f"{flags} --offload-resident-fraction 0")
    assert got.digest == resident_run.digest == none.digest
    assert got.losses == resident_run.losses
    num = sum(seen[0][0].values())
    assert [places["resident"] for places, *_ in seen] == [0] * NUM_STEPS + [num] * (8 - NUM_STEPS)
    line = f"placement changed after 3 steps: {num} more of {num} subgroups stay on the GPU, {num} in all"
    assert got.text.count("placement changed") == got.text.count(line) == 1
    assert [lines == seen[0][2] for *_, lines in seen] == [True] * NUM_STEPS + [False] * (8 - NUM_STEPS)
    assert any(line in text for text in seen[-1][2]) and f"{num} resident on the GPU" in seen[-1][2][0]
    assert seen[2][1].plan.placement != seen[3][1].plan.placement
    assert seen[3][1].update_seconds == pytest.approx(expected_of_residents.update_seconds)
    assert seen[3][1].binding_lane == expected_of_residents.binding_lane == "gpu"
    for lane in ("h2d_bytes", "d2h_bytes"):
        assert traffic[2][lane] > traffic[1][lane] and traffic[-1][lane] == traffic[2][lane]


def test_loop_grows_in_part(resident_run):
    """A peak that leaves some room makes some more subgroups stay; the rest goes on as it was."""
    seen = []
    with paper_gpu(500_000, 300_000):
        got = train(
            f"{COMMON} {AUTO} --offload-gpu-share 0.5 --offload-num-slots 2",
            before_step=lambda optimizer: seen.append(counts(optimizer._engine)),
        )
    assert got.digest == resident_run.digest
    assert 0 < seen[2]["resident"] < seen[3]["resident"] < sum(seen[3].values())
    assert seen[3]["cpu"] > 0 and seen[3]["gpu"] > 0 and seen[3] == seen[-1]


@pytest.mark.parametrize(
    ("flags", "at_start", "at_peak"),
    [
        (AUTO, 1, -1),
        (f"{AUTO} --offload-device-budget-gib 0.0005", PLENTY, PLENTY),
        ("--offload-resident-fraction 0.25", PLENTY, PLENTY),
    ],
    ids=["no room", "budget", "fraction"],
)
def test_loop_stays_as_it_is(flags, at_start, at_peak, resident_run):
    """Without room at the peak nothing changes; budgets and fractions that are given are kept."""
    seen = []
    with paper_gpu(at_start, at_peak):
        got = train(f"{COMMON} {flags}", before_step=lambda optimizer: seen.append(counts(optimizer._engine)))
    assert got.digest == resident_run.digest and "placement changed" not in got.text
    assert seen[0] == seen[-1] and seen[0]["resident"] < sum(seen[0].values())


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_the_dry_run_says_what_a_run_does(part):
    """With the memory of the profile's GPU, free but for weights and gradients, a run places as its dry run says."""
    flags = f"{LLAMA_LIKE} {LOOP} {COMMON} {AUTO} --offload-gpu-share 0.5 --offload-num-slots 2 --train-iters 1"
    config = parse_args(flags.split(), world_size=1).with_vocab(500)
    model = model_bytes(run_shape(config))
    numel = model.weights // 2
    total = round((10.2 * part * numel + model.weights + model.gradients + 1.1 * working_bytes(model)) / 0.95)
    profile = replace(BUILT_IN_PROFILES["h200"], gpu_memory_bytes=total, host_memory_bytes=0)
    stage = forecast(run_shape(config), config.offload, profile).stages[0]
    memory = GpuMemory(total - model.weights - model.gradients, total, reserved=0, allocated=0, peak=total)
    seen = []
    with (
        mock.patch.object(build, "memory_reader", lambda _device: lambda: memory),
        mock.patch.object(build, "profile_for_run", lambda *_unused, **_named: profile),
    ):
        train(flags, before_step=lambda optimizer: seen.append(optimizer._engine))
    assert seen[0].settings.placement == stage.choice.placement
    share = counts(seen[0])["resident"] / len(stage.choice.placement)
    assert share == part if part in (0.0, 1.0) else 0 < share < part


@pytest.mark.parametrize(("left", "slots"), [(PLENTY, 8), (0, 4)])
def test_slots_keep_to_what_the_estimate_leaves(left, slots):
    """More slots than are needed are taken only from memory that the estimate leaves, be it none."""
    profile = replace(BUILT_IN_PROFILES["h200"], op_overhead_seconds=0.0)
    seen = []
    with (
        paper_gpu(left),
        mock.patch.object(training, "run_shape", lambda _config: None),  # the compute assumed instead hides enough
        mock.patch.object(build, "profile_for_run", lambda *_unused, **_named: profile),
    ):
        train(
            f"{COMMON} --offload-resident-fraction 0 --offload-gpu-share 1 --train-iters 1",
            before_step=lambda optimizer: seen.append(optimizer._engine.settings),
        )
    assert seen[0].num_slots == slots


def test_without_a_gpu_nothing_is_resident():
    """On the CPU `auto` keeps its meaning."""
    seen = []
    train(f"{COMMON} {AUTO} --train-iters 5", before_step=lambda optimizer: seen.append(counts(optimizer._engine)))
    assert seen[0] == seen[-1] and seen[0]["resident"] == 0


def test_start_with_less_room_than_the_estimate_says(resident_run):
    """Residents that cannot be allocated are halved until they fit, with one line; the bits stay."""
    seen = []
    with paper_gpu(PLENTY, -1), device_of(600_000) as refused:
        got = train(f"{COMMON} {AUTO}", before_step=lambda optimizer: seen.append(counts(optimizer._engine)))
    assert got.digest == resident_run.digest
    assert len(refused) >= 1 and got.text.count("but it has no memory for them") == 1
    assert 0 < seen[0]["resident"] < sum(seen[0].values())


def test_start_without_any_room(resident_run):
    """Where not a single resident fits none stays, and everything is updated by the CPU."""
    seen = []
    with paper_gpu(PLENTY, -1), device_of(1000) as refused:
        got = train(
            f"{COMMON} {AUTO} --offload-gpu-share 0",
            before_step=lambda optimizer: seen.append(counts(optimizer._engine)),
        )
    assert got.digest == resident_run.digest and seen[0]["resident"] == 0 and len(refused) > 1
    assert got.text.count("0 B stay") == 1


def test_residents_that_were_asked_for_must_fit():
    """Nothing is swallowed where the fraction is given."""
    with device_of(600_000), pytest.raises(torch.OutOfMemoryError):
        train(f"{COMMON} --offload-resident-fraction 1")


def test_growth_without_room_after_all(resident_run):
    """The measured peak leaves room, the allocation fails all the same: one line, nothing changes."""
    seen = []
    with paper_gpu(1, PLENTY), device_of(50_000):
        got = train(
            f"{COMMON} {AUTO} --offload-gpu-share 0",
            before_step=lambda optimizer: seen.append(counts(optimizer._engine)),
        )
    assert got.digest == resident_run.digest and seen[0] == seen[-1]
    assert got.text.count("the placement stays as it is") == 1 and "placement changed" not in got.text


def test_a_checkpoint_behind_the_change(tmp_path, resident_run):
    """A checkpoint of grown residents loads under another placement, and the run ends in the same bits."""
    half = f"{COMMON} --save {tmp_path} --save-interval 5"
    with paper_gpu(1, PLENTY):
        train(f"{half} {AUTO} --offload-gpu-share 0.5 --exit-interval 5")
    # The restart is another one: its own first three steps decide again.
    seen = []
    with paper_gpu(1, 300_000):
        got = train(
            f"{half} --load {tmp_path} {AUTO} --offload-gpu-share 0",
            before_step=lambda optimizer: seen.append(counts(optimizer._engine)),
        )
    assert got.digest == resident_run.digest
    assert len(seen) == 3 and seen[0]["resident"] == seen[2]["resident"] == 0
    again = train(f"{COMMON} --load {tmp_path} --offload-resident-fraction 0 --train-iters 8")
    assert again.digest == resident_run.digest


def test_a_writer_has_read_before_state_moves(resident_run):
    """A checkpoint's writer that reads beside training is waited for while state still lies where it began to read."""
    moved, waited = [], []

    def before(optimizer):
        moved.append(counts(optimizer._engine)["resident"])
        optimizer.before_update = lambda: waited.append(counts(optimizer._engine)["resident"])

    with paper_gpu(1, PLENTY):
        got = train(f"{COMMON} {AUTO}", before_step=before)
    assert got.digest == resident_run.digest
    assert moved[NUM_STEPS] > 0
    # Once more than there are updates: the wait before the fourth forward pass still sees the old placement.
    assert waited == [0] * (NUM_STEPS + 1) + [moved[NUM_STEPS]] * (8 - NUM_STEPS)
