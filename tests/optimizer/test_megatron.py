"""Through the real training loop: every offload setting gives the bits of the all-resident run and of the oracle."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import bits
from loop_cases import GPT_LIKE, LLAMA_LIKE, pairwise, train
from megatron.core.utils import unwrap_model
from oracle import OracleParam

from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.factory import hardware_queue_warning
from deep_offload.plan.ops import LANE_OF, OpKind
from deep_offload.runtime.lanes import HostDevice
from deep_offload.runtime.worker import SubgroupWorker


@pytest.fixture(scope="module", autouse=True)
def one_profile(tmp_path_factory):
    """Rates are measured once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


PRECISIONS = {
    "bf16": "--bf16",
    "bf16 16-bit gradients": "--bf16 --grad-reduce-in-bf16",
    "fp16": "--fp16 --initial-loss-scale 1024 --loss-scale-window 1000",
    "fp32": "",
}
MODELS = {"llama": LLAMA_LIKE, "gpt": GPT_LIKE}
CASES = pairwise(
    {
        "place": ("--offload-gpu-share 0", "--offload-gpu-share 0.4", "--offload-gpu-share 1", "--offload-stride 3"),
        "precision": tuple(PRECISIONS),
        "resident": (0.0, 0.5),
        "slots": (1, 2, 3),
        "wire": ("fp32", "param"),
        "subgroup": (4096, 9000),
        "accumulation": (1, 4),
        "model": ("llama", "gpt"),
        "threads": (1, 2),
        "split": ("on", "off"),
    }
)


@pytest.fixture(scope="module")
def resident_runs():
    cache: dict = {}

    def get(precision: str, accumulation: int, model: str):
        key = precision, accumulation, model
        if key not in cache:
            cache[key] = train(
                f"{PRECISIONS[precision]} --global-batch-size {accumulation} --offload-resident-fraction 1",
                model=MODELS[model],
            )
        return cache[key]

    return get


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v).replace("--offload-", "") for v in c.values()))
def test_every_setting_has_the_bits_of_the_resident_run(resident_runs, case):
    """A pairwise cover of placement, precision, slots, wire, sizes and accumulation: one digest, one loss curve."""
    precision, split = PRECISIONS[case["precision"]], case["split"]
    wire = case["wire"] if case["precision"] == "bf16 16-bit gradients" else "fp32"
    if not precision.startswith("--bf16"):
        split = "off"
    got = train(
        f"{precision} {case['place']} --offload-resident-fraction {case['resident']} --offload-num-slots "
        f"{case['slots']} "
        f"--offload-grad-wire {wire} --offload-subgroup-numel {case['subgroup']} --offload-split-master {split} "
        f"--global-batch-size {case['accumulation']} --offload-cpu-threads {case['threads']}",
        model=MODELS[case["model"]],
    )
    want = resident_runs(case["precision"], case["accumulation"], case["model"])
    assert got.losses == want.losses
    for number, states in want.state.items():
        for name, tensor in states.items():
            assert torch.equal(bits(got.state[number][name]), bits(tensor)), f"{name} of parameter {number}"
    assert got.digest == want.digest
    moved = {lane: got.traffic[lane] > 0 for lane in ("cpu_params", "gpu_params", "h2d_bytes", "d2h_bytes")}
    streams = "share 0" not in case["place"] or case["resident"] > 0 or "0.4" in case["place"]
    assert moved["h2d_bytes"] and moved["d2h_bytes"]
    assert moved["gpu_params"] == streams
    assert moved["cpu_params"] == ("share 1" not in case["place"])


@pytest.mark.parametrize("place", ["--offload-gpu-share 0.5", "--offload-gpu-share 0", "--offload-gpu-share 1"])
def test_oracle_reproduces_the_loop(place):
    """A per-parameter Adam fed clones of DDP's final gradients gives the same masters, moments and weights."""
    oracle: dict[int, OracleParam] = {}
    grads: dict[int, torch.Tensor] = {}
    clipped: list[bool] = []

    def before(optimizer):
        for number, param in enumerate(optimizer._buffers.params):
            oracle.setdefault(number, OracleParam(param.detach().clone()))
            grads[number] = param.main_grad.detach().clone()

    def after(optimizer, norm):
        scale = min(1.0, 0.5 / (norm + 1e-6))
        clipped.append(scale < 1.0)
        for number, o in oracle.items():
            group = optimizer.param_groups[optimizer._group_of[number]]
            o.update(
                grads[number],
                lr=group["lr"],
                betas=(0.9, 0.95),
                eps=1e-8,
                weight_decay=group["weight_decay"],
                scale=scale,
            )

    got = train(f"--bf16 {place} --offload-resident-fraction 0", model=GPT_LIKE, before_step=before, after_step=after)
    assert sum(clipped) > 10
    for number, o in oracle.items():
        want = {"master": o.master, "exp_avg": o.exp_avg, "exp_avg_sq": o.exp_avg_sq, "weight": o.weight()}
        for name, tensor in want.items():
            assert torch.equal(bits(got.state[number][name]), bits(tensor.flatten())), f"{name} of parameter {number}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_skips_the_step_and_is_counted(bad):
    """One bad gradient element: that step changes no bit of parameters or state, and the log counts it."""
    steps = []

    def before(optimizer):
        steps.append(optimizer)
        if len(steps) == 4:
            optimizer._buffers.shards[0].shard.grad[3] = bad

    seen: dict[str, str] = {}

    def after(optimizer, _norm):
        if len(steps) in (3, 4):
            seen[str(len(steps))] = str(
                {n: {k: v.double().sum().item() for k, v in s.items()} for n, s in _states(optimizer).items()}
            )

    got = train(
        "--bf16 --offload-gpu-share 0.5 --offload-resident-fraction 0 --train-iters 6",
        before_step=before,
        after_step=after,
    )
    assert seen["3"] == seen["4"]
    assert got.skipped == ["0", "0", "0", "1", "0", "0"]


def _states(optimizer):
    from loop_cases import param_states

    optimizer.synchronize()
    return param_states(optimizer)


def test_an_update_whose_flushes_outlive_the_next_step_is_shown(monkeypatch):
    """Where the last flushes of an update still run when the next one begins, the log shows the update before it."""
    flush, outlived = SubgroupWorker.flush, []
    monkeypatch.setattr(SubgroupWorker, "flush", lambda self, op: time.sleep(0.2) or flush(self, op))

    def after(optimizer, _norm):
        engine = optimizer._engine
        outlived.append(engine._finished is not None and not engine._backend.is_done(engine._finished.completions))

    flags = "--bf16 --offload-gpu-share 1 --offload-resident-fraction 0 --train-iters 6 --offload-subgroup-numel 20000"
    got = train(flags, after_step=after)
    assert all(outlived[1:]), outlived
    assert got.text.count("| offload update: ") == 4, got.text


MUTATED = "--bf16 --offload-gpu-share 0.5 --offload-resident-fraction 0 --train-iters 8 --offload-num-slots 2"


@pytest.fixture(scope="module")
def healthy_digest():
    """The digest that a mutated run must not reach, and that a healthy one does."""
    digest = train("--bf16 --offload-resident-fraction 1 --train-iters 8").digest
    assert train(MUTATED).digest == digest
    return digest


@pytest.mark.parametrize("handler", ["flush", "param_h2d", "grad_flush", "prefetch"])
def test_mutation_a_copy_left_out(monkeypatch, healthy_digest, handler):
    """Without the flush, the parameter upload, the gradient flush or the prefetch the digest differs."""
    monkeypatch.setattr(SubgroupWorker, handler, lambda self, op: 0)
    assert train(MUTATED).digest != healthy_digest


def test_each_module_waits_for_its_own_parameters(monkeypatch, healthy_digest):
    """The first layers' forward pass asks for few subgroups, later ones for more, and not waiting changes the bits."""
    counts, original = [], OffloadEngine.wait_for_params

    def watch(self, count):
        counts.append((count, len(self.layout.subgroups)))
        original(self, count)

    monkeypatch.setattr(OffloadEngine, "wait_for_params", watch)
    assert train(MUTATED).digest == healthy_digest
    num_subgroups = counts[0][1]
    ends = [i for i, (count, _) in enumerate(counts) if count == num_subgroups]
    first_step = [count for count, _ in counts[: ends[0]]]
    assert len(set(first_step)) >= 4 and max(first_step[:10]) <= num_subgroups // 2

    def too_late(self, count):
        if count == len(self.layout.subgroups):
            original(self, count)

    upload = SubgroupWorker.param_h2d
    monkeypatch.setattr(SubgroupWorker, "param_h2d", lambda self, op: time.sleep(0.05) or upload(self, op))
    monkeypatch.setattr(OffloadEngine, "wait_for_params", too_late)
    assert train(MUTATED).digest != healthy_digest


@pytest.mark.parametrize(
    ("slow", "waiter"),
    [
        (OpKind.PREFETCH, OpKind.UPDATE_GPU),
        (OpKind.UPDATE_GPU, OpKind.FLUSH),
        (OpKind.FLUSH, OpKind.PREFETCH),
        (OpKind.UPDATE_CPU, OpKind.PARAM_H2D),
        (OpKind.GRAD_FLUSH, OpKind.UPDATE_CPU),
        (OpKind.PARAM_H2D, OpKind.PARAMS_NEEDED),
    ],
    ids=lambda kind: kind.value,
)
def test_mutation_a_wait_left_out(monkeypatch, healthy_digest, slow, waiter):
    """Without one kind of wait, and the op it waits for slowed down, the digest differs."""
    original, original_wait = getattr(SubgroupWorker, slow.value), HostDevice.wait

    def late(self, op):
        if slow is OpKind.PARAM_H2D:  # the output layer's, long after the loop has gone on
            time.sleep(0.4 if op.subgroup == len(self._subgroups) - 1 else 0)
        else:
            time.sleep(0.02 if slow is OpKind.GRAD_FLUSH else 0.003)  # backward gives gradients a head start
        return original(self, op)

    def wait(self, lane, done):
        if not (done.op.kind is slow and lane is LANE_OF[waiter]):
            original_wait(self, lane, done)

    # All on the CPU there: else the loop waits for an update on the device, whose prefetch is behind the slow upload.
    arguments = MUTATED.replace("share 0.5", "share 0") if slow is OpKind.PARAM_H2D else MUTATED
    monkeypatch.setattr(SubgroupWorker, slow.value, late)
    assert train(arguments).digest == healthy_digest, "a delay alone must not change a bit"
    monkeypatch.setattr(HostDevice, "wait", wait)
    assert train(arguments).digest != healthy_digest


@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"])
@pytest.mark.parametrize(
    "place", ["--offload-resident-fraction 0 --offload-gpu-share 0.5", "--offload-resident-fraction 1"]
)
def test_state_dicts_bring_back_every_bit(precision, place):
    """Both forms of the optimizer's state, taken after a step and loaded after two more, undo those two."""
    taken, seen = [], []

    def after(optimizer, _norm):
        seen.append(optimizer.num_steps)
        if len(seen) == 3:
            model = unwrap_model(optimizer._chunks[0]).sharded_state_dict()
            taken.extend([optimizer.state_dict(), optimizer.sharded_state_dict(model), _states(optimizer)])
            taken.append(optimizer.get_loss_scale().item())
        if len(seen) in (5, 6):
            load = optimizer.load_state_dict if len(seen) == 5 else optimizer.load_sharded_state_dict
            state = taken[0] if len(seen) == 5 else _as_loaded(taken[1])
            assert optimizer.num_steps > 3
            load(state)
            assert optimizer.num_steps == 3
            assert optimizer.get_loss_scale().item() == taken[3]
            for number, states in _states(optimizer).items():
                for name, tensor in states.items():
                    assert torch.equal(bits(tensor), bits(taken[2][number][name])), f"{name} of parameter {number}"

    train(f"{precision} {place} --train-iters 6", after_step=after)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("flags", "saved", "scale", "trackers"),
    [
        ("--loss-scale 128", {"scale": 4096.0, "growth_tracker": 1, "hysteresis_tracker": 1}, 128.0, None),
        ("--loss-scale 128", {"scale": 4096.0}, 128.0, None),
        ("--initial-loss-scale 1024", {"scale": 4096.0, "growth_tracker": 5, "hysteresis_tracker": 1}, 4096.0, (5, 1)),
        ("--initial-loss-scale 1024", {"scale": 4096.0}, 1024.0, (0, 2)),
        ("--initial-loss-scale 1024", {}, 1024.0, (0, 2)),
        ("--initial-loss-scale 1024", None, 1024.0, (0, 2)),
    ],
)
def test_only_a_dynamic_loss_scale_is_taken_and_only_whole(flags, saved, scale, trackers):
    """A constant one stays what the command line says, and what a constant one left behind is no dynamic one's."""
    seen = []

    def before(optimizer):
        if not seen:
            optimizer.resume(0, saved if saved is None else {k: torch.tensor(v) for k, v in saved.items()})
            scaler = optimizer._scaler
            counts = None if trackers is None else (scaler._growth_tracker, scaler._hysteresis_tracker)
            seen.append((optimizer.get_loss_scale().item(), counts))

    train(f"--fp16 {flags} --train-iters 1", before_step=before)
    assert seen == [(scale, trackers)]


def _as_loaded(state):
    """A sharded state dict with its tensors in place of their descriptions, as dist_checkpointing returns it."""
    params = {n: {k: entry.data for k, entry in entries.items()} for n, entries in state["param_state"].items()}
    return {**state, "param_state": params}


@pytest.mark.parametrize(
    ("queues", "device", "offloads", "tensor", "is_warned"),
    [
        ("1", "cuda", True, 1, True),
        ("8", "cuda", True, 1, False),
        (None, "cuda", True, 1, False),
        ("1", "cpu", True, 1, False),
        ("1", "cuda", False, 1, False),
        ("1", "cuda", True, 2, False),
    ],
)
def test_one_hardware_queue_is_warned_of(monkeypatch, queues, device, offloads, tensor, is_warned):
    """The variable of Megatron's scripts is named with its measured price where nothing gains by it."""
    if queues is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    lines = hardware_queue_warning(device, offloads, tensor)
    assert len(lines) == is_warned and all("1.08 times" in line for line in lines)
