"""Bytes and seconds of a run: the layers' saved tensors, counts of parameters, dry runs, searches."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from deep_offload.config import OffloadConfig
from deep_offload.model.dry_run import dry_run_report, forecast, ranks_per_host
from deep_offload.model.gpt import NAMED_SHAPES, GPTShape, ParallelShape, chunk_params, named_shape, padded_to
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.memory import SAVE_HOST_BYTES, format_bytes
from deep_offload.model.planning import (
    alternatives,
    faster_cut,
    fewest_gpus,
    first_fitting,
    fits,
    largest_model,
    layouts,
    other_cuts,
    save_seconds,
    token_budget,
)
from deep_offload.model.run import (
    RecomputeShape,
    RunShape,
    compute_seconds,
    layer_bytes,
    least_model_bytes,
    model_bytes,
)

H200, H100X4, H100X8 = (BUILT_IN_PROFILES[name] for name in ("h200", "h100x4", "h100x8"))
AUTO = OffloadConfig(interleaved_offload=True)
OFFLOAD = replace(AUTO, offload_resident_fraction=0.0)
FULL = RecomputeShape(granularity="full", method="uniform")
PEER = GPTShape(
    num_layers=16,
    hidden_size=4096,
    ffn_hidden_size=16384,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    padded_vocab_size=32000,
    tie_embeddings=False,
)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("7b", 5.95), ("8.3b", 9.14), ("10b", 9.92), ("13b", 11.3), ("20b", 15.3), ("8b", 8.03), ("70b", 70.6)],
)
def test_known_sizes(name, billions):
    """Named shapes have the numbers of parameters that are published for them."""
    assert named_shape(name).num_params / 1e9 == pytest.approx(billions, rel=0.005)


def test_parallel_ranks_hold_the_model_once():
    """Weights of all tensor and pipeline ranks together are the model, apart from what every rank has a copy of."""
    shape = NAMED_SHAPES["7b"]
    whole = shape.num_params
    for parallel in (ParallelShape(pipeline=4), ParallelShape(pipeline=2, virtual=4)):
        parts = [
            sum(p.numel for p in chunk_params(shape, parallel, rank, stage))
            for rank in range(parallel.pipeline)
            for stage in range(parallel.virtual)
        ]
        assert sum(parts) == whole
    tensor = sum(p.numel for p in chunk_params(shape, ParallelShape(tensor=4)))
    copies = (2 * shape.num_layers + 1) * shape.hidden_size
    assert 4 * (tensor - copies) + copies == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=0), "--num-layers is 0"),
        (dict(hidden_size=-4), "--hidden-size is -4"),
        (dict(num_query_groups=5), "--num-attention-heads 32 is not a multiple of --num-query-groups 5"),
        (dict(normalization="none"), "--normalization 'none' is unknown"),
    ],
)
def test_models_that_cannot_exist(change, message):
    """A model without layers, or with heads that do not divide, gets one sentence."""
    with pytest.raises(ValueError, match=message):
        replace(PEER, **change)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelShape(pipeline=3), "16 layers cannot be cut evenly over 3 pipeline ranks"),
        (ParallelShape(tensor=5), "cannot be split over 5 tensor-parallel ranks"),
    ],
)
def test_layouts_that_cannot_exist(parallel, message):
    """Layers, heads and vocabulary that do not split over the ranks are refused."""
    with pytest.raises(ValueError, match=message):
        parallel.check(PEER)
    with pytest.raises(ValueError, match="it must be a whole number of at least 1"):
        ParallelShape(data=0)


def run_of(shape: GPTShape = PEER, parallel: ParallelShape | None = None, **changes) -> RunShape:
    parallel = parallel or ParallelShape()
    values = dict(seq_length=2048, micro_batch_size=1, global_batch_size=parallel.data, grad_bytes=2, recompute=FULL)
    return RunShape(model=shape, parallel=parallel, **{**values, **changes})


def test_batches_that_do_not_divide():
    """A global batch that is no multiple of the ranks' micro-batches is refused."""
    with pytest.raises(ValueError, match="--global-batch-size 3 is not a multiple of"):
        run_of(parallel=ParallelShape(data=2), global_batch_size=3)
    with pytest.raises(ValueError, match="--micro-batch-size is 0"):
        run_of(micro_batch_size=0)


def test_weights_and_gradients_follow_the_buffers():
    """Weights and gradients are DDP's buffers in their types; data-parallel ranks hold all of both."""
    one, four = model_bytes(run_of()), model_bytes(run_of(parallel=ParallelShape(data=4), grad_bytes=4))
    assert one.weights == one.gradients == 2 * run_of().buffers().numel
    assert four.gradients == 2 * four.weights
    assert one.total == one.weights + one.gradients + one.activations + one.largest


@pytest.mark.parametrize(
    ("shape", "micro_batch", "slots_gib", "measured_gib"),
    [
        (PEER, 1, 4.992, 18.77),
        (PEER, 1, 2.496, 16.27),
        (PEER, 8, 2.496, 20.74),
        (NAMED_SHAPES["7b"], 1, 2.490, 25.86),
        (NAMED_SHAPES["8.3b"], 1, 2.504, 38.11),
    ],
)
def test_measured_peaks_are_predicted(shape, micro_batch, slots_gib, measured_gib):
    """GPU bytes of runs in docs/performance.md, beside the slots that they had: within 1 %, 3 % are asked for."""
    run = run_of(shape, micro_batch_size=micro_batch, global_batch_size=micro_batch, has_rope=shape is not PEER)
    assert model_bytes(run).total / 2**30 + slots_gib == pytest.approx(measured_gib, rel=0.01)


def test_recomputation_saves_memory():
    """Full recomputation keeps a layer's input, blocks less of them, and tensor and sequence parallelism a part."""
    none = model_bytes(run_of(recompute=RecomputeShape()))
    full = model_bytes(run_of())
    pairs = model_bytes(run_of(recompute=replace(FULL, num_layers=2)))
    block = model_bytes(run_of(recompute=RecomputeShape(granularity="full", method="block", num_layers=8)))
    assert full.activations < block.activations < none.activations
    assert full.activations == 16 * 2048 * 4096 * 2 + layer_bytes(run_of())
    assert pairs.activations == 8 * 2048 * 4096 * 2 + 2 * layer_bytes(run_of())
    assert none.activations == 16 * layer_bytes(run_of())
    tensor = run_of(parallel=ParallelShape(tensor=4, sequence_parallel=True))
    tables = 4 * 2048 * 128 * 2
    assert 4 * (layer_bytes(tensor) - tables) == layer_bytes(run_of()) - tables
    selective = run_of(recompute=RecomputeShape(granularity="selective", modules=("mlp",)))
    assert layer_bytes(selective) == layer_bytes(run_of()) - 2048 * 2 * 16384 * 2


def test_pipelines_keep_micro_batches_in_flight():
    """The first stage holds one set of activations per stage behind it, the last one a single set and the logits."""
    run = run_of(parallel=ParallelShape(pipeline=4), global_batch_size=16)
    stages = [model_bytes(run, rank) for rank in range(4)]
    saved = [s.activations - layer_bytes(run) for s in stages]
    assert [s // saved[3] for s in saved] == [4, 3, 2, 1]
    assert [s.head > 0 for s in stages] == [False, False, False, True]
    few = run_of(parallel=ParallelShape(pipeline=4), global_batch_size=2)
    assert model_bytes(few, 0).activations < stages[0].activations
    virtual = run_of(parallel=ParallelShape(pipeline=4, virtual=2), global_batch_size=16)
    assert model_bytes(virtual, 0).activations > stages[0].activations


def test_compute_time():
    """Backward takes twice the forward pass, once more with full recomputation; pipelines add their bubble."""
    plain, again = (compute_seconds(run_of(recompute=r), H200) for r in (RecomputeShape(), FULL))
    assert plain.backward == 2 * plain.forward and again.backward == 3 * again.forward
    assert again.communication == 0.0 and again.bubble == 0.0
    assert again.iteration == pytest.approx(4 * again.forward)
    pipe = compute_seconds(run_of(parallel=ParallelShape(pipeline=4), global_batch_size=12), H100X4)
    assert pipe.bubble == 3 / 12
    wide = compute_seconds(run_of(parallel=ParallelShape(data=4)), H100X4)
    assert wide.communication > 0.0
    assert compute_seconds(run_of(parallel=ParallelShape(data=8)), H100X4).communication is None
    # 6 x parameters x tokens, and causal attention, at the profile's rate
    flops = 6 * (PEER.matmul_params * 2048 + 16 * 32 * 128 * 2048 * 2048)
    assert plain.iteration == pytest.approx(flops / H200.gpu_flops_per_s)


def test_a_measured_iteration_is_predicted():
    """The 3.48 B model of the measured prototype, half streamed, nothing resident: its iteration within 12 %."""
    run = run_of(has_rope=False)
    config = replace(OFFLOAD, offload_gpu_share=0.5, offload_resident_fraction=0.0)
    result = forecast(run, config, H200)
    assert result.iteration_seconds == pytest.approx(0.723, rel=0.12)


def test_dry_run_reports():
    """A run that fits says so; one that does not names bytes, the limit and what to change."""
    lines, ok = dry_run_report(run_of(), OFFLOAD, H200)
    text = "\n".join(lines)
    assert ok and lines[-1] == "fits"
    for part in (
        "3.48 B parameters",
        "GPU share",
        "GPU bytes of a rank",
        "host bytes of a rank",
        "predicted iteration",
    ):
        assert part in text
    lines, ok = dry_run_report(run_of(NAMED_SHAPES["20b"]), OFFLOAD, H200)
    assert not ok and "of host memory, but this rank has 124.00 GiB" in lines[-1]
    assert "host bytes for a rank: 125.00 GiB, 1.00 GiB of them for a save" in lines
    lines, ok = dry_run_report(run_of(NAMED_SHAPES["20b"], ParallelShape(data=4), grad_bytes=4), OFFLOAD, H100X4)
    assert not ok and "of GPU memory, but 76.00 GiB of a single h100x4 GPU are usable" in lines[-1]
    stages = dry_run_report(run_of(NAMED_SHAPES["7b"], ParallelShape(pipeline=2)), OFFLOAD, H100X4).lines
    assert any(line.startswith("stage 1: host bytes") for line in stages)
    assert "ESTIMATE" in "\n".join(dry_run_report(run_of(), OFFLOAD, BUILT_IN_PROFILES["gh200"]).lines)


def test_a_save_counts_on_the_host():
    """Host memory that state alone fills is too little for a save; the process, which the limit lacks, is told only."""
    run = run_of(NAMED_SHAPES["7b"])
    stage = forecast(run, OFFLOAD, H200).stages[0]
    assert stage.total_host_bytes == stage.host_bytes + SAVE_HOST_BYTES
    least = forecast(run, replace(OFFLOAD, offload_gpu_share=1.0), replace(H200, host_memory_bytes=0)).stages[0]
    state = least.choice.host_bytes.total - least.choice.host_bytes.reserve
    assert not fits(run, OFFLOAD, replace(H200, host_memory_bytes=state + SAVE_HOST_BYTES - 1))
    assert fits(run, OFFLOAD, replace(H200, host_memory_bytes=state + SAVE_HOST_BYTES))
    (line,) = [line for line in dry_run_report(run, OFFLOAD, H200).lines if line.startswith("host bytes of a rank")]
    assert f"a rank: {format_bytes(stage.host_bytes)} of state" in line
    total = f"with 1.00 GiB for a save {format_bytes(stage.total_host_bytes)} of 125.00 GiB"
    assert line.endswith(f"{total}, and 1.80 GiB of its process beside that limit")
    tiny = replace(H200, host_memory_bytes=1 << 29)
    assert "1.00 GiB of it for a save" in "\n".join(dry_run_report(run_of(), AUTO, tiny).lines)
    assert not fits(run_of(), AUTO, tiny)


@pytest.mark.parametrize(
    ("unknown", "line"),
    [
        (dict(host_memory_bytes=0), "GPU memory fits; not checked: host memory, which"),
        (dict(gpu_memory_bytes=0), "host memory fits; not checked: GPU memory, which"),
        (dict(gpu_memory_bytes=0, host_memory_bytes=0), "not checked: GPU memory and host memory, which"),
    ],
)
def test_unknown_limits_are_no_fit(unknown, line):
    """Where the profile does not know a limit the report says so, and never that the run fits."""
    lines, ok = dry_run_report(run_of(), OFFLOAD, replace(H200, **unknown))
    assert ok and lines[-1].startswith(line) and lines[-1].endswith("hardware profile h200 does not know")
    assert sum("(limit unknown)" in text for text in lines) == len(unknown)


def test_models_far_too_large_cost_nothing():
    """Weights alone settle it, however many layers: no report, search or count of parameters lays them out."""
    start = time.process_time()
    shape = replace(PEER, num_layers=1_000_000, hidden_size=65536, ffn_hidden_size=4 * 65536, tie_embeddings=True)
    for profile in (H100X8, replace(H100X8, gpu_memory_bytes=0)):
        lines, ok = dry_run_report(run_of(shape), OFFLOAD, profile)
        assert not ok and "weights and gradients of a rank alone need" in lines[-1]
    assert fewest_gpus(run_of(shape), OFFLOAD, H100X8) is None
    assert time.process_time() - start < 2


def test_the_closed_form_is_a_bound():
    """It never exceeds what the buffers take, and lies close below."""
    for parallel in (ParallelShape(), ParallelShape(tensor=4), ParallelShape(pipeline=4)):
        run = run_of(parallel=parallel)
        least = sum(least_model_bytes(run))
        stages = [model_bytes(run, rank) for rank in range(parallel.pipeline)]
        assert 0.8 < least / max(stage.weights + stage.gradients for stage in stages) <= 1


def test_what_takes_the_iteration_is_named():
    """Compute, the update, communication, or the pipeline's bubble, of which a large one is warned."""

    def text(run, config=AUTO, profile=H100X4) -> str:
        return "\n".join(dry_run_report(run, config, profile).lines)

    assert "bound by compute;" in text(run_of(), profile=H200)
    assert "bound by the update (" in text(run_of(), OFFLOAD)
    pipe = run_of(parallel=ParallelShape(pipeline=4))
    assert "bound by the pipeline's bubble;" in text(pipe) and "warning: the pipeline's bubble adds 300 %" in text(pipe)
    assert "warning" not in text(run_of(parallel=ParallelShape(pipeline=4), global_batch_size=12))
    slow = replace(H100X4, collective_bytes_per_s=1e8)
    assert "bound by communication;" in text(run_of(parallel=ParallelShape(data=4)), profile=slow)


def test_ranks_of_a_host():
    """As many as it has GPUs; fewer where the hosts could not all have as many, and tensor parallelism stays inside."""
    assert [ranks_per_host(size, H100X8) for size in (1, 6, 8, 12, 16)] == [1, 6, 8, 6, 8]
    no_gpu = replace(H200, num_gpus=0)
    assert ranks_per_host(4, no_gpu) == 1 and ranks_per_host(4, no_gpu, 2) == 2
    assert [ranks_per_host(8, H100X8, started) for started in (None, 1, 2, 4, 8)] == [8, 8, 2, 4, 8]
    assert ranks_per_host(8, H100X8, 3) == 8, "hosts could not all have three"
    cuts = [run.parallel for run in layouts(run_of(), 12, H100X8)]
    assert {cut.tensor for cut in cuts} == {1, 2} and all(cut.world_size == 12 for cut in cuts)


def test_ranks_of_a_host_without_gpus_share_it():
    """Where the profile has no GPUs the ranks started here count: in words, in bytes, and in the simulation."""
    profile = replace(H200, num_gpus=0, gpu_memory_bytes=0)
    run = run_of(parallel=ParallelShape(data=2), global_batch_size=2)
    alone, both = (dry_run_report(run, OFFLOAD, profile, ranks).lines for ranks in (1, 2))
    assert any(line.endswith("data 2, 1 per host") for line in alone)
    assert any(line.endswith("data 2, 2 per host") for line in both)
    assert any(" of 125.00 GiB, and" in line for line in alone) and any(" of 62.50 GiB, and" in line for line in both)
    one, two = (forecast(run, replace(OFFLOAD, offload_gpu_share=0.0), profile, ranks) for ranks in (1, 2))
    update = [result.slowest.choice.predicted_update_seconds for result in (one, two)]
    assert (one.ranks_per_host, two.ranks_per_host) == (1, 2) and update[1] > 1.2 * update[0]


def test_ranks_that_a_launcher_started_share_a_host():
    """Four on each host of eight GPUs have twice the host memory each, and communicate between hosts."""
    run = run_of(parallel=ParallelShape(data=8), overlap_grad_reduce=True)
    full, half = (forecast(run, OFFLOAD, H100X8, started) for started in (8, 4))
    assert (full.ranks_per_host, half.ranks_per_host) == (8, 4)
    lines = [dry_run_report(run, OFFLOAD, H100X8, started).lines for started in (8, 4)]
    assert any(" of 256.00 GiB, and" in line for line in lines[0])
    assert any(" of 512.00 GiB, and" in line for line in lines[1])
    ratio = H100X8.collective_bytes_per_s / H100X8.network_bytes_per_s
    assert half.compute.communication > 0.5 * ratio * full.compute.communication > 0
    assert half.compute == compute_seconds(run, H100X8, 4) and full.compute == compute_seconds(run, H100X8)


def test_the_method_s_formula_stands_beside_the_choice():
    """Once, for a run that is offloaded: its stride and what is made of it, or that it has none."""

    def said(profile, config=OFFLOAD, parallel=None) -> list[str]:
        lines = dry_run_report(run_of(parallel=parallel), config, profile).lines
        return [line for line in lines if line.startswith("the method's own formula")]

    counted = "the method's own formula (host memory not counted): "
    assert said(H100X4) == [f"{counted}stride k = 1.61, rounded up to 2"]
    assert said(H100X4, parallel=ParallelShape(pipeline=2)) == said(H100X4)
    slow = replace(H100X4, h2d_both_bytes_per_s=1e9, d2h_both_bytes_per_s=1e9)
    assert said(slow) == [f"{counted}no stride, the CPU always wins"]
    assert said(H200, AUTO) == [], "nothing is offloaded"


def test_a_faster_cut_is_found():
    """Of cuts on as many GPUs the one with the most tokens per second, if it fits and is worth a word."""
    run = run_of(NAMED_SHAPES["20b"], ParallelShape(data=4), recompute=RecomputeShape(), overlap_grad_reduce=True)
    here, cuts = forecast(run, AUTO, H100X4), other_cuts(run, AUTO, H100X4)
    faster = faster_cut(here, cuts)
    assert faster is not None and faster.result.run.parallel == ParallelShape(tensor=2, data=2)
    assert faster.result.tokens_per_s_per_gpu > 1.5 * here.tokens_per_s_per_gpu
    assert faster_cut(faster.result, cuts) is None
    assert faster_cut(here, [replace(faster, problems=("too large",))]) is None


def test_budgets_are_honored():
    """The budget flags limit the dry run as they limit training."""
    assert not dry_run_report(run_of(), replace(OFFLOAD, offload_host_budget_gib=10.0), H200).fits
    roomy = forecast(run_of(), replace(AUTO, offload_device_budget_gib=30.0), H200)
    assert 0 < roomy.stages[0].choice.resident_fraction < 1
    assert roomy.stages[0].choice.device_bytes.total <= 30 << 30


@pytest.mark.parametrize("shape", [PEER, NAMED_SHAPES["20b"]], ids=["all fits", "a part fits"])
def test_alternatives_are_ordered_by_physics(shape):
    """With nothing resident the chosen share is no slower than any other; what the model chooses with free residents
    is no slower than that, and where all state fits it costs what no offload costs."""
    found = {a.name.split(" (")[0]: a for a in alternatives(run_of(shape), AUTO, H200)}
    seconds = {name: a.result.iteration_seconds for name, a in found.items() if a.result is not None}
    best, nothing = seconds["chosen by the model"], seconds.get("nothing resident")
    assert found["chosen by the model"].problems == ()
    if shape is PEER:
        for name in ("all on the CPU", "stride 2", "stride 3", "stride 4", "all streamed to the GPU"):
            assert nothing <= seconds[name] * 1.001
        assert best == seconds["no offload"] < nothing
        assert found["no offload"].result.stages[0].host_bytes == 0
        assert found["nothing resident"].result.stages[0].choice.resident_fraction == 0
    else:  # host memory holds no such model without residents, and the GPU not all of its state
        assert nothing is None and "host memory" in found["nothing resident"].problems[0]
        assert "of GPU memory" in found["no offload"].problems[0]
        assert 0 < found["chosen by the model"].result.stages[0].choice.resident_fraction < 1


def test_other_cuts():
    """More data-parallel ranks hold less state each, more tensor-parallel ones less of everything; what no host allows
    is left out."""
    run = run_of(parallel=ParallelShape(tensor=2, data=2), global_batch_size=2)
    assert len(other_cuts(run, OFFLOAD, H100X4)) == 2, "4 data-parallel ranks have no batch of 2"
    run = replace(run, global_batch_size=4)
    data, tensor, whole = other_cuts(run, OFFLOAD, H100X4)
    here = forecast(run, OFFLOAD, H100X4).stages[0]
    assert [cut.result.run.parallel.world_size for cut in (data, tensor, whole)] == [8, 4, 4]
    assert [cut.result.run.global_batch_size for cut in (data, tensor, whole)] == [8, 4, 4]
    assert tensor.name == "4 GPUs: tensor 4 x pipeline 1 x data 1"
    assert data.result.stages[0].host_bytes < here.host_bytes
    assert tensor.result.stages[0].gpu_bytes < here.gpu_bytes
    assert whole.result is None or whole.result.stages[0].gpu_bytes > here.gpu_bytes
    assert len(other_cuts(run_of(), OFFLOAD, H200)) == 1


def test_searches():
    """Fewer GPUs than found do not fit, one layer more than found does not fit, and what is found fits."""
    run = run_of(NAMED_SHAPES["20b"], recompute=RecomputeShape())
    found = fewest_gpus(run, OFFLOAD, H200)
    assert found is not None and found.parallel.world_size == 2 and fits(found, OFFLOAD, H200)
    assert first_fitting(run, 1, OFFLOAD, H200) is None
    largest = largest_model(replace(run, model=NAMED_SHAPES["8b"]), 1, OFFLOAD, H200)
    assert largest is not None and fits(largest, OFFLOAD, H200)
    more = replace(largest.model, num_layers=largest.model.num_layers + 1)
    assert first_fitting(replace(largest, model=more), 1, OFFLOAD, H200) is None
    cut = replace(largest, parallel=ParallelShape(tensor=2, pipeline=4), global_batch_size=3)
    deepest = largest_model(cut, 8, OFFLOAD, H100X8, is_cut=True)
    assert deepest is not None and replace(deepest, model=cut.model) == cut and deepest.model.num_layers % 4 == 0
    more = replace(deepest.model, num_layers=deepest.model.num_layers + 4)
    assert fits(deepest, OFFLOAD, H100X8) and not fits(replace(deepest, model=more), OFFLOAD, H100X8)
    hopeless = replace(run, model=replace(run.model, hidden_size=1 << 20, ffn_hidden_size=1 << 22))
    assert fewest_gpus(hopeless, OFFLOAD, H200, most=2) is None


def test_costs_of_a_token_budget():
    """Days and GPU-hours follow from the iteration time; a save from bytes and the disk."""
    result = forecast(run_of(parallel=ParallelShape(data=4), global_batch_size=4), OFFLOAD, H100X4)
    budget = token_budget(result, 1e9)
    assert budget.iterations == -(-(10**9) // (4 * 2048))
    assert budget.gpu_hours == pytest.approx(4 * 24 * budget.days)
    assert token_budget(result, 0.3).iterations == 1 and token_budget(result, 4 * 2048 + 0.1).iterations == 2
    assert save_seconds(result) is None
    single = forecast(run_of(), OFFLOAD, H200)
    assert save_seconds(single) == pytest.approx(14 * PEER.num_params / H200.disk_write_bytes_per_s)


def test_padding():
    """The vocabulary is padded to 128 rows for each tensor-parallel rank."""
    assert padded_to(replace(PEER, padded_vocab_size=32001), 4).padded_vocab_size == 32256


def test_large_jobs_are_planned_in_seconds():
    """512 ranks with 8 pipeline stages take well under 10 s of this process's time."""
    start = time.process_time()
    parallel = ParallelShape(tensor=8, pipeline=8, data=8)
    result = forecast(
        run_of(NAMED_SHAPES["70b"], parallel, global_batch_size=512, overlap_grad_reduce=True), OFFLOAD, H100X8
    )
    assert len(result.stages) == 8 and not result.problems
    assert time.process_time() - start < 10
