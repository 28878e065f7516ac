"""Which device trains: the GPU that torch can use, the CPU of a machine without one, or an error that says why."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class SystemGpus:
    """What the operating system says about NVIDIA GPUs. `evidence` is empty where there is none."""

    evidence: str = ""
    driver_version: str = "unknown"


@dataclass(frozen=True, slots=True)
class TorchCuda:
    """What torch can do: its version, the CUDA it was built for (None: a CPU build), usable GPUs, and its complaint."""

    version: str
    built_for: str | None
    num_gpus: int
    complaint: str = ""


def find_system_gpus(root: Path = Path("/"), smi: str | None = "nvidia-smi") -> SystemGpus:
    """Return the GPUs that the system shows, without torch.

    root: folder that holds `dev` and `proc`; smi: the nvidia-smi program, None to not ask it.
    """
    nodes = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    listed = root / "proc" / "driver" / "nvidia" / "gpus"
    cards = sorted(path.name for path in listed.iterdir()) if listed.is_dir() else []
    driver = _driver_version(root / "proc" / "driver" / "nvidia" / "version")
    answer = _ask_smi(smi)
    if answer is not None:
        return SystemGpus(f"nvidia-smi lists {answer[0]}", answer[1])
    if nodes:
        return SystemGpus(f"/dev has {', '.join(nodes)}", driver)
    if cards:
        return SystemGpus(f"/proc/driver/nvidia/gpus lists {', '.join(cards)}", driver)
    return SystemGpus("", driver)


def find_torch_cuda(local_rank: int) -> TorchCuda:
    """Return what torch can use; one tiny kernel on this rank's GPU proves that it works. Initializes CUDA there."""
    version, built_for = torch.__version__, torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        return TorchCuda(version, built_for, 0)
    num_gpus = torch.cuda.device_count()
    try:
        # On the rank's own GPU: a context on GPU 0 for every rank would take its memory.
        torch.zeros(1, device=torch.device("cuda", min(local_rank, num_gpus - 1))).add_(1).item()
    except RuntimeError as error:
        return TorchCuda(version, built_for, 0, str(error).splitlines()[0])
    return TorchCuda(version, built_for, num_gpus)


def choose_device(local_rank: int, one_gpu_per_task: bool, system: SystemGpus, cuda: TorchCuda) -> torch.device:
    """Return the device of this rank: its GPU, or the CPU of a machine without one.

    one_gpu_per_task: the launcher shows each rank its own single GPU (SLURM's --gpus-per-task).
    Raises ValueError where the system shows a GPU that torch cannot use, or has fewer GPUs than ranks on this host.
    """
    if cuda.num_gpus == 0:
        if not system.evidence:
            return torch.device("cpu")
        built = f"built for CUDA {cuda.built_for}" if cuda.built_for else "built for CPUs only"
        why = f" ({cuda.complaint})" if cuda.complaint else ""
        raise ValueError(
            f"{system.evidence} with driver {system.driver_version}, but torch {cuda.version}, {built}, cannot use "
            f"it{why}: install a torch that fits the driver, check CUDA_VISIBLE_DEVICES, or pass --use-cpu"
        )
    if one_gpu_per_task and cuda.num_gpus == 1:
        return torch.device("cuda", 0)
    if local_rank >= cuda.num_gpus:
        raise ValueError(
            f"rank {local_rank} of this host has no GPU, torch sees {cuda.num_gpus}: start at most {cuda.num_gpus} "
            "ranks per host, or pass --use-cpu"
        )
    return torch.device("cuda", local_rank)


def describe_device(device: torch.device, world_size: int) -> str:
    """Return the start-up line that says what trains."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        return (
            f"> training on GPU {properties.name} ({memory:.1f} GiB), torch {torch.__version__}, "
            f"CUDA {torch.version.cuda}, {ranks}"
        )
    return f"> training on the CPU ({torch.get_num_threads()} threads), torch {torch.__version__}, {ranks}"


def _driver_version(path: Path) -> str:
    if not path.exists():
        return "unknown"
    match = re.search(r"Kernel Module[^\d]*([\d.]+)", path.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else "unknown"


def _ask_smi(smi: str | None) -> tuple[str, str] | None:
    """Return (names, driver version) of the GPUs that nvidia-smi lists, None where it lists none."""
    program = shutil.which(smi) if smi else None
    if program is None:
        return None
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.rsplit(",", 1) for line in answer.stdout.splitlines() if "," in line]
    if answer.returncode != 0 or not rows:
        return None
    names = sorted({row[0].strip() for row in rows})
    return f"{len(rows)} x {' / '.join(names)}", rows[0][1].strip()
