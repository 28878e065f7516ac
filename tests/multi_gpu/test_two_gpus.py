"""Two GPUs of one host: every offload setting has the bits of the all-resident run of its layout."""

from __future__ import annotations

import pytest
import torch

from tests.multi_gpu.cuda_cases import LANES, delayed, without_waiting_for_reductions
from tests.parallel import fsdp_cases

FLAGS = "--global-batch-size 4 --overlap-grad-reduce --overlap-param-gather --train-iters 4"
BF16 = "--bf16 --grad-reduce-in-bf16"
RESIDENT = "--offload-resident-fraction 1"
OFFLOADED = "--offload-resident-fraction 0"
PLACES = [
    f"{OFFLOADED} --offload-gpu-share 0",
    f"{OFFLOADED} --offload-gpu-share 0.5 --offload-split-master on --offload-num-slots 2",
    "--offload-resident-fraction 0.3",
]
PLACE = f"{OFFLOADED} --offload-gpu-share 0.5 --offload-num-slots 2"


def check_same(got, want, what):
    """Losses, norms and digest of the reference; ranks that hold the same parameter agree; the model is no toy."""
    assert got[-1].losses == want[-1].losses and len(want[-1].losses) == 4, what
    assert got[-1].norms == want[-1].norms, what
    assert got[0].digest == want[0].digest and want[0].digest.startswith("sha256:"), what
    assert all(o.replicas_agree for o in got + want), what
    assert all(o.num_subgroups >= 12 for o in got), [o.num_subgroups for o in got]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp2", BF16),
        ("dp2", "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"),
        ("tp2 sp", BF16),
        ("tp2", ""),
        ("pp2", BF16),
        ("pp2 virtual", "--bf16"),
    ],
)
def test_offload_is_invisible(train, layout, precision):
    """All on the CPU, half streamed with a split master, and the planner's own share with residents: one digest."""
    places = PLACES if "bf16" in precision else [place.replace("--offload-split-master on", "") for place in PLACES]
    want, *got = train(layout, [f"{precision} {FLAGS} {place}" for place in (RESIDENT, *places)])
    for outcomes, place in zip(got, places):
        check_same(outcomes, want, place)
    assert sum(o.traffic["cpu_params"] for o in got[0]) > 0 and sum(o.traffic["d2h_bytes"] for o in got[1]) > 0


@pytest.fixture(scope="module")
def want(train):
    """Of the all-resident run that the delayed ones are compared with."""
    return train("dp2", [f"{BF16} {FLAGS} {RESIDENT}"])[0]


@pytest.mark.parametrize("what", (*LANES, "collectives"))
def test_a_delay_changes_no_bit(train, want, what):
    """Spin kernels on one lane's stream, or before each collective on a stream of its own."""
    (got,) = train("dp2", [f"{BF16} {FLAGS} {PLACE}"], delayed, what)
    check_same(got, want, what)


def test_mutation_a_wait_left_out(train, want):
    """Gradients flushed before their late reduction has ended are noticed: the tests above can fail."""
    (got,) = train("dp2", [f"{BF16} {FLAGS} {OFFLOADED} --offload-gpu-share 0"], without_waiting_for_reductions)
    assert got[0].digest != want[0].digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp_sharded_parameters(pool, cache, dtype):
    """InterleavedAdamW over fully_shard's parameters: every placement has the resident run's bits on both ranks."""
    places = [
        dict(offload_resident_fraction=1.0),
        dict(offload_resident_fraction=0.0, offload_gpu_share=0.5),
        dict(offload_resident_fraction=0.3, offload_gpu_share=0.0),
    ]
    for results in pool.run(fsdp_cases.run, cache, dtype, places):
        weights, _, norms = results[0]
        assert max(norms) > fsdp_cases.CLIP
        fsdp_cases.assert_resident_bits(results[0], [results[1], results[2]])
        tolerance = 2e-5 if dtype == "float32" else 2e-2
        for mine, theirs in zip(weights, results[len(places)][0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
