"""`python -m deep_offload doctor` on this very machine, without a GPU."""

from __future__ import annotations

import json
import os
import time
import types

import pytest
import torch

from deep_offload import doctor
from deep_offload.cli import main
from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.model.hardware import HardwareProfile, profile_from_json
from deep_offload.model.this_machine import cpu_update_threads
from deep_offload.runtime import probe
from deep_offload.runtime.measure import profile_for_run


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))


def test_json_of_this_machine(tmp_path, capsys):
    """One JSON object with facts, findings and the profile, which training then takes without measuring."""
    started = time.perf_counter()
    assert main(["doctor", "--json", "--use-cpu", "--disk", str(tmp_path)]) == 0
    assert time.perf_counter() - started < 60
    found = json.loads(capsys.readouterr().out)
    facts = found["facts"]
    assert facts["cores"] == len(os.sched_getaffinity(0)) and facts["gpus"] == []
    assert set(facts["triad"]) == {str(count) for count in doctor.thread_counts(facts["cores"])}
    assert all(rate > 0 for rate in (*facts["triad"].values(), facts["triad_under_copies"], facts["cpu_adam"]))
    assert facts["isa"] in facts["isas"] and facts["disk_write"] > 0
    assert {"python", "torch", "megatron-core"} <= set(facts["versions"])
    assert all(f["cost"] and f["advice"] for f in found["findings"] if f["verdict"] == "cost")
    written = profile_from_json(open(facts["profile_file"]).read())
    assert written == HardwareProfile(**found["profile"])
    assert written.disk_write_bytes_per_s == facts["disk_write"]
    assert not list(tmp_path.glob(".deep_offload_probe*"))
    lines: list[str] = []
    threads = cpu_update_threads(facts["cores"], 1, False)
    assert profile_for_run(None, torch.device("cpu"), threads, log=lines.append) == written and lines == []


def test_lines_without_a_profile(tmp_path, capsys):
    """Lines with a verdict first and a count at the end; --no-profile writes nothing."""
    assert main(["doctor", "--use-cpu", "--no-profile", "--disk", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("good  versions: python") for line in lines)
    assert "good" in lines[-1] and lines[-1].endswith(" s")
    assert not (tmp_path / "cache").exists()


def test_a_missing_kernel_and_disk_are_findings(tmp_path, capsys, monkeypatch):
    """Without the compiled module the doctor still ends, with exit code 2 and the way to build it."""

    def missing():
        raise cpu_kernels.ExtensionMissingError("not there; build it with `pip install -e .`")

    monkeypatch.setattr(cpu_kernels, "extension", missing)
    assert main(["doctor", "--use-cpu", "--disk", str(tmp_path / "nowhere")]) == 2
    out = capsys.readouterr().out
    assert " bad  CPU kernel: not built" in out and "pip install -e ." in out
    assert "cannot be written (No such file or directory)" in out


def test_numa_and_huge_pages_from_files(tmp_path):
    """The kernel's own texts are read: lists of cores, and the word in brackets."""
    core = min(os.sched_getaffinity(0))
    for node, cores in ((0, f"{core}-{core}"), (1, "100000-100003,100008"), (10, "")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(cores + "\n")
    assert doctor.numa_nodes(tmp_path) == {0: 1}
    assert doctor._cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert doctor.huge_pages(tmp_path / "enabled") == "madvise"
    assert doctor.huge_pages(tmp_path / "absent") == "" and doctor.numa_nodes(tmp_path / "absent") == {}


def test_the_node_of_a_gpu(tmp_path):
    """The kernel's number counts; where it knows none, the only node is meant, and with two nodes it stays unknown."""
    gpu = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert doctor.numa_node(gpu, tmp_path) == 0
    file = tmp_path / "bus/pci/devices/0000:1b:00.0/numa_node"
    file.parent.mkdir(parents=True)
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    file.write_text("-1\n")
    assert doctor.numa_node(gpu, tmp_path) == 0
    (tmp_path / "devices/system/node/node1").mkdir()
    assert doctor.numa_node(gpu, tmp_path) == -1
    file.write_text("1\n")
    assert doctor.numa_node(gpu, tmp_path) == 1 and doctor.numa_node(object(), tmp_path) == -1


def test_thread_counts_end_with_all_cores():
    """1, 2, 4 and so on, and whatever number of cores there is."""
    assert doctor.thread_counts(1) == [1] and doctor.thread_counts(12) == [1, 2, 4, 8, 12]


def test_an_error_in_a_loop_is_raised():
    """A copy that fails while others are measured ends the measurement with its error."""

    def fail():
        raise RuntimeError("link down")

    with pytest.raises(RuntimeError, match="link down"), probe._running([fail]):
        time.sleep(0.01)
