"""What the doctor makes of a machine: good ones get no advice, and each fault is named with its price and its cure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_offload.doctor_verdicts import CPU_STATE_BYTES, GIB, Facts, Gpu, judge
from deep_offload.model.cost import StateFormat
from deep_offload.model.memory import host_state_bytes
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Place

GPU = Gpu("H200", 139 * GIB, 0, 55e9, 55e9, 12e9, 9e9, 46e9, 46e9)
GOOD = Facts(
    gpus=(GPU, GPU),
    together=(92e9, 92e9),
    all_reduce=150e9,
    cores=32,
    cpu_threads=15,
    numa_nodes={0: 32},
    triad={1: 17e9, 4: 63e9, 16: 140e9, 32: 190e9},
    triad_under_copies=120e9,
    cpu_adam=4e9,
    cpu_adam_busy=2.4e9,
    cpu_adam_threads=30,
    isa="avx512",
    isas=("avx512", "avx2"),
    available_bytes=250 * GIB,
    available_source="cgroup",
    huge_pages="madvise",
    disk_write=2e9,
    versions={"torch": "2.13"},
    profile_file="/cache/profile.json",
)


def named(facts: Facts) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in judge(facts)}


def test_a_good_machine_gets_no_advice():
    """Every finding is good, and none has a price."""
    findings = judge(GOOD)
    assert {finding.verdict for finding in findings} == {"good"}
    assert all(not finding.cost and not finding.advice for finding in findings)
    assert {"link of GPU 0", "link of GPU 1", "all links", "NUMA", "host memory", "CPU Adam", "disk"} <= set(
        named(GOOD)
    )


SLOW_PEER = replace(GPU, pinned_h2d=26e9)
FAULTS = {
    "link of GPU 1": ({"gpus": (GPU, SLOW_PEER)}, "copies slower than its peers"),
    "link of GPU 0": ({"gpus": (replace(GPU, pinned_h2d=6e9, pinned_d2h=6e9),)}, "slower than PCIe 3"),
    "all links": ({"together": (50e9, 50e9)}, "links share a path"),
    "NUMA": ({"gpus": (GPU, replace(GPU, numa_node=1))}, "no core of node 1"),
    "NCCL variables": ({"nccl_variables": {"NCCL_P2P_DISABLE": "1"}}, "forbids direct copies"),
    "reduce-scatter over all GPUs": ({"all_reduce": 1e9}, "slower than over PCIe"),
    "cores": ({"cores": 4, "cpu_threads": 1}, "fewer than 4 cores"),
    "host memory": ({"triad": {1: 17e9, 32: 90e9}}, "slower than all links"),
    "CPU Adam": ({"cpu_adam": 0.5e9}, "of memory bandwidth"),
    "CPU kernel": ({"isa": "avx2"}, "wider instruction set"),
    "host memory limit": ({"available_bytes": 8 * GIB}, "less than 16 GiB"),
    "locked memory": ({"memlock_bytes": 64 << 10}, "pinned memory"),
    "huge pages": ({"huge_pages": "never"}, "reserved at 4 GB/s"),
    "disk": ({"disk_write": 0.1e9}, "140 s a checkpoint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_its_price_and_cure(name):
    """One fault put into a good machine changes that finding to `will cost you x because y: do z`."""
    changes, reason = FAULTS[name]
    finding = next(f for f in judge(replace(GOOD, **changes)) if f.name == name)
    assert finding.verdict == "cost" and reason in finding.cost and finding.advice
    assert f"will cost you {finding.cost}: {finding.advice}" in str(finding)


def test_how_much_state_the_host_holds():
    """As many bytes a parameter as the arena takes where the CPU updates, with 16-bit and with fp32 gradients."""
    for name, grad_bytes, wire in (("16-bit", 2, "param"), ("fp32", 4, "fp32")):
        layout = build_layout([ShardSpec(1 << 24, 2, grad_bytes)], 1 << 20)
        host = host_state_bytes(layout, (Place.CPU,) * 16, StateFormat(True, wire))
        assert host.total == CPU_STATE_BYTES[name] << 24
    finding = next(f for f in judge(replace(GOOD, available_bytes=252 * 10**9)) if f.name == "host memory limit")
    assert (
        "state of about 18.0 G parameters updated by the CPU with 16-bit gradients, 14.0 G with fp32" in finding.value
    )


def test_other_jobs_on_the_cores_are_seen():
    """More threads that make memory slower mean that somebody else works there."""
    busy = replace(GOOD, gpus=(), triad={1: 20e9, 2: 9e9})
    finding = next(f for f in judge(busy) if f.name == "host memory")
    assert finding.verdict == "cost" and "other jobs" in finding.cost


@pytest.mark.parametrize(
    "changes",
    [
        {"extension_problem": "build it with pip install -e ."},
        {"gpus": (), "gpu_problem": "torch is built without CUDA"},
    ],
)
def test_what_stops_training_is_bad(changes):
    """A missing kernel and a GPU that torch cannot use are worse than slow."""
    assert "bad" in named(replace(GOOD, **changes)).values()


def test_what_cannot_be_judged_is_a_note():
    """No GPU, no memory limit, unknown huge pages and no profile are notes, with no price."""
    verdicts = named(replace(GOOD, gpus=(), available_bytes=None, huge_pages="", profile_file=""))
    for name in ("GPUs", "host memory limit", "huge pages", "hardware profile"):
        assert verdicts[name] == "note"


def test_rates_say_how_many_ranks_they_are_of():
    """With several GPUs the profile and the CPU's rate are of one rank alone, and both lines say so."""
    texts = {finding.name: finding.value for finding in judge(GOOD)}
    assert "with 30 threads" in texts["CPU Adam"] and texts["CPU Adam"].endswith("of one rank alone")
    assert (
        "training uses it with one rank; with more, such as 2, it measures at its first start"
        in (texts["hardware profile"])
    )
    alone = {finding.name: finding.value for finding in judge(replace(GOOD, gpus=(GPU,), together=()))}
    assert alone["hardware profile"].endswith("training uses it") and "one rank" not in alone["CPU Adam"]
