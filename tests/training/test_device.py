"""Which device trains, shown to a machine that is made of a temporary folder."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from megatron.training.device import SystemGpus, TorchCuda, choose_device, find_system_gpus

CPU_TORCH = TorchCuda("2.13.0+cpu", None, 0)
OLD_DRIVER = TorchCuda("2.13.0+cu130", "13.0", 0, "the driver is too old")
ONE_GPU = TorchCuda("2.13.0+cu130", "13.0", 1)
SHOWN = SystemGpus("nvidia-smi lists 1 x H200", "535.104.05")


@pytest.fixture
def root(tmp_path):
    """A machine without a GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "null").touch()
    return tmp_path


def add_driver(root):
    """Give the machine an NVIDIA driver and one card in /proc."""
    folder = root / "proc" / "driver" / "nvidia"
    (folder / "gpus" / "0000:1b:00.0").mkdir(parents=True)
    (folder / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")


def write_smi(root, text, code=0):
    """Return a program that answers like nvidia-smi."""
    program = root / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
    os.chmod(program, stat.S_IRWXU)
    return str(program)


def test_no_gpu(root):
    """A machine without any trace of a GPU shows none."""
    assert find_system_gpus(root, smi=None) == SystemGpus("", "unknown")
    assert find_system_gpus(root, smi=write_smi(root, "No devices were found\\n", 6)).evidence == ""


def test_device_node_is_evidence(root):
    """A device node counts, the driver's version comes from /proc; control nodes alone do not count."""
    (root / "dev" / "nvidiactl").touch()
    assert find_system_gpus(root, smi=None).evidence == ""
    (root / "dev" / "nvidia0").touch()
    add_driver(root)
    assert find_system_gpus(root, smi=None) == SystemGpus("/dev has nvidia0", "535.104.05")


def test_proc_is_evidence(root):
    """A card that only /proc lists counts."""
    add_driver(root)
    assert find_system_gpus(root, smi=None) == SystemGpus("/proc/driver/nvidia/gpus lists 0000:1b:00.0", "535.104.05")


def test_smi_is_asked(root):
    """nvidia-smi's answer names the cards and the driver."""
    smi = write_smi(root, "NVIDIA H200, 580.65.06\\nNVIDIA H200, 580.65.06\\n")
    assert find_system_gpus(root, smi=smi) == SystemGpus("nvidia-smi lists 2 x NVIDIA H200", "580.65.06")


def test_cpu_machine_trains_on_cpu():
    """No GPU in the system: the CPU, without a flag."""
    assert choose_device(0, False, SystemGpus(), CPU_TORCH) == torch.device("cpu")


@pytest.mark.parametrize(
    ("cuda", "words"),
    [(CPU_TORCH, ["2.13.0+cpu", "CPUs only"]), (OLD_DRIVER, ["2.13.0+cu130", "CUDA 13.0", "the driver is too old"])],
)
def test_unusable_gpu_is_refused(cuda, words):
    """A GPU that torch cannot use is an error with both versions, and --use-cpu is the way past it."""
    with pytest.raises(ValueError) as caught:
        choose_device(0, False, SHOWN, cuda)
    for word in [*words, "535.104.05", "H200", "--use-cpu"]:
        assert word in str(caught.value)


def test_one_gpu_each():
    """Ranks take the GPU of their number; a rank without one is refused, unless each rank sees only its own."""
    assert choose_device(0, False, SHOWN, ONE_GPU) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="torch sees 1"):
        choose_device(1, False, SHOWN, ONE_GPU)
    assert choose_device(1, True, SHOWN, ONE_GPU) == torch.device("cuda", 0)
