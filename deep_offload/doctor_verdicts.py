"""What the doctor's measurements mean: for each fact a verdict, what it costs and what to do. Pure, no torch.

A verdict is `good`, `cost` (it works, and loses speed or memory), `bad` (training would fail) or `note` (cannot be
judged, with the reason).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

GIB = 1 << 30
_PCIE_3_BYTES_PER_S = 12e9
"""What pinned copies reach over 16 lanes of PCIe 3, the slowest link worth having."""

CPU_STATE_BYTES = {"16-bit": 14, "fp32": 18}
"""Host bytes of a parameter that the CPU updates: master and moments 12, the gradient 2 or 4; an outgoing weight takes
the place of a 16-bit gradient, and 2 bytes beside an fp32 one."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's figures. Rates in bytes/s; numa_node -1: unknown."""

    name: str
    memory_bytes: int
    numa_node: int
    pinned_h2d: float
    pinned_d2h: float
    pageable_h2d: float
    pageable_d2h: float
    both_h2d: float
    both_d2h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the doctor found out. Rates in bytes/s or parameters/s, None: not measured (`reasons` says why)."""

    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    together: tuple[float, ...] = ()
    all_reduce: float | None = None
    """Of a reduce-scatter over all GPUs, for each of them; an all-reduce, two of its kind, was timed."""
    nccl_variables: dict[str, str] = field(default_factory=dict)
    cores: int = 1
    cpu_threads: int = 1
    numa_nodes: dict[int, int] = field(default_factory=dict)
    """Cores of this process by NUMA node."""
    triad: dict[int, float] = field(default_factory=dict)
    triad_under_copies: float | None = None
    cpu_adam: float | None = None
    cpu_adam_busy: float | None = None
    cpu_adam_threads: int = 1
    """What one rank alone has, as those rates were measured."""
    isa: str = ""
    isas: tuple[str, ...] = ()
    extension_problem: str = ""
    available_bytes: int | None = None
    available_source: str = "none set"
    memlock_bytes: int | None = None
    huge_pages: str = ""
    """The kernel's choice for memory that asks for them: always, madvise or never; empty: unknown."""
    disk_folder: str = "."
    disk_write: float | None = None
    disk_problem: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    profile_file: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. cost and advice are empty where nothing is to be done."""

    name: str
    value: str
    verdict: str
    cost: str = ""
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict:>4}  {self.name}: {self.value}"
        if self.verdict in ("cost", "bad"):
            text += f"\n      will cost you {self.cost}: {self.advice}"
        return text


def judge(facts: Facts) -> list[Finding]:
    """All findings, in the order in which a person reads them."""
    checks: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _versions,
        _extension,
        _gpus,
        _links,
        _together,
        _numa,
        _collectives,
        _cores,
        _memory_rate,
        _adam,
        _memory,
        _huge_pages,
        _disk,
        _profile,
    )
    return [finding for check in checks for finding in check(facts)]


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def _versions(facts: Facts) -> Iterator[Finding]:
    yield Finding("versions", ", ".join(f"{name} {text}" for name, text in facts.versions.items()), "good")


def _extension(facts: Facts) -> Iterator[Finding]:
    if facts.extension_problem:
        yield Finding("CPU kernel", "not built", "bad", "the whole CPU update, training stops", facts.extension_problem)
    else:
        value = f"{facts.isa} (of {', '.join(facts.isas)})"
        if facts.isas and facts.isa != facts.isas[0]:
            advice = "unset DEEP_OFFLOAD_ISA"
            yield Finding(
                "CPU kernel", value, "cost", "speed, as a wider instruction set is there but not used", advice
            )
        else:
            yield Finding("CPU kernel", value, "good")


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.gpu_problem:
        advice = "install a driver and a torch build that match (torch.cuda.is_available() must be True)"
        yield Finding(
            "GPUs", facts.gpu_problem, "bad", "every GPU of this machine, because torch cannot use it", advice
        )
    elif not facts.gpus:
        yield Finding("GPUs", "none: the CPU plays the device, for tests and dry runs", "note")
    for i, gpu in enumerate(facts.gpus):
        yield Finding(f"GPU {i}", f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB", "good")


def _links(facts: Facts) -> Iterator[Finding]:
    best = max((min(g.pinned_h2d, g.pinned_d2h) for g in facts.gpus), default=0.0)
    for i, gpu in enumerate(facts.gpus):
        slow = min(gpu.pinned_h2d, gpu.pinned_d2h)
        value = f"up {_gb(gpu.pinned_h2d)}, down {_gb(gpu.pinned_d2h)}, both at once {_gb(gpu.both_h2d)} and "
        value += f"{_gb(gpu.both_d2h)}, pageable {_gb(gpu.pageable_h2d)} and {_gb(gpu.pageable_d2h)}"
        if slow < 0.8 * best:
            cost = f"{100 * (1 - slow / best):.0f} % of this link's speed, because GPU {i} copies slower than its peers"
            advice = "look for a narrower slot, a shared switch or the wrong NUMA node (nvidia-smi topo -m)"
            yield Finding(f"link of GPU {i}", value, "cost", cost, advice)
        elif slow < 0.9 * _PCIE_3_BYTES_PER_S:
            cost = "most of the link's speed, because pinned copies are slower than PCIe 3 x16"
            advice = (
                "check the slot's width and generation (nvidia-smi -q -d PCIE), and a virtual machine's passthrough"
            )
            yield Finding(f"link of GPU {i}", value, "cost", cost, advice)
        elif gpu.both_h2d + gpu.both_d2h < 1.2 * slow:
            cost = "up to half of the update's speed, because both directions share one rate here"
            yield Finding(
                f"link of GPU {i}", value, "cost", cost, "let the planner choose the share (leave it at auto)"
            )
        else:
            yield Finding(f"link of GPU {i}", value, "good")


def _together(facts: Facts) -> Iterator[Finding]:
    if len(facts.gpus) < 2 or not facts.together:
        return
    alone = sum(g.both_h2d + g.both_d2h for g in facts.gpus)
    together = sum(facts.together)
    value = f"{_gb(together)} over all links at once, {_gb(alone)} if each were alone"
    if together < 0.8 * alone:
        cost = f"{100 * (1 - together / alone):.0f} % of link speed with all ranks at work, because links share a path"
        yield Finding("all links", value, "cost", cost, "spread ranks over GPUs of different switches or sockets")
    else:
        yield Finding("all links", value, "good")


def _numa(facts: Facts) -> Iterator[Finding]:
    nodes = facts.numa_nodes
    value = ", ".join(f"node {node}: {cores} cores" for node, cores in nodes.items()) or "unknown"
    homes = [gpu.numa_node for gpu in facts.gpus]
    if homes:
        value += "; " + ", ".join(f"GPU {i} at {'?' if n < 0 else n}" for i, n in enumerate(homes))
    missing = sorted({n for n in homes if n >= 0 and n not in nodes}) if nodes else []
    if missing:
        cost = f"up to half of the CPU update, because no core of node {missing[0]} may be used and its GPU is there"
        yield Finding(
            "NUMA", value, "cost", cost, "allow cores of every GPU's node (taskset, cgroup cpuset, SLURM binding)"
        )
    elif len(nodes) > 1 and any(n < 0 for n in homes):
        yield Finding("NUMA", value, "note")
    else:
        yield Finding("NUMA", value, "good")


def _collectives(facts: Facts) -> Iterator[Finding]:
    value = " ".join(f"{k}={v}" for k, v in facts.nccl_variables.items()) or "none set"
    if facts.nccl_variables.get("NCCL_P2P_DISABLE") == "1":
        cost = "most of the speed between GPUs, because NCCL_P2P_DISABLE=1 forbids direct copies"
        yield Finding("NCCL variables", value, "cost", cost, "unset NCCL_P2P_DISABLE unless a fault needs it")
    elif facts.nccl_variables.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield Finding("NCCL variables", value, "cost", "a flooded log", "unset NCCL_DEBUG once all runs well")
    else:
        yield Finding("NCCL variables", value, "good")
    if facts.all_reduce is not None:
        is_slow = facts.all_reduce < 5e9
        cost = "time after every backward pass, because GPUs reach each other slower than over PCIe"
        advice = "check nvidia-smi topo -m, NVLink, and IOMMU or ACS settings"
        found = ("cost", cost, advice) if is_slow else ("good",)
        yield Finding("reduce-scatter over all GPUs", f"{_gb(facts.all_reduce)} a GPU", *found)


def _cores(facts: Facts) -> Iterator[Finding]:
    ranks = max(1, len(facts.gpus))
    per_rank = facts.cores / ranks
    value = f"{facts.cores} for this process, {per_rank:.0f} a rank, {facts.cpu_threads} of them for the CPU update"
    if facts.gpus and per_rank < 4:
        cost = "speed of the CPU update, because a rank has fewer than 4 cores"
        advice = "give the job more cores, or leave the share at auto so that the GPU updates more"
        yield Finding("cores", value, "cost", cost, advice)
    else:
        yield Finding("cores", value, "good")


def _memory_rate(facts: Facts) -> Iterator[Finding]:
    if not facts.triad:
        return
    counts = sorted(facts.triad)
    best = max(facts.triad.values())
    value = ", ".join(f"{_gb(facts.triad[n])} at {n}" for n in counts) + " threads"
    enough = next(n for n in counts if facts.triad[n] >= 0.9 * best)
    value += f" ({enough} reach 90 % of the most)"
    if facts.triad_under_copies is not None:
        value += f"; {_gb(facts.triad_under_copies)} beside copies"
    link = sum(g.both_h2d + g.both_d2h for g in facts.gpus)
    if link and best < link:
        cost = f"up to {100 * (1 - best / link):.0f} % of link speed, because host memory is slower than all links"
        advice = "fill all memory channels, use cores of every socket, or keep more state on the GPUs"
        yield Finding("host memory", value, "cost", cost, advice)
    elif facts.triad[counts[-1]] < 0.7 * best:
        cost = "speed of the CPU update, because all cores together reach less than a few: other jobs work on them"
        yield Finding("host memory", value, "cost", cost, "move other jobs away, or lower --offload-cpu-threads")
    else:
        yield Finding("host memory", value, "good")


def _adam(facts: Facts) -> Iterator[Finding]:
    if facts.cpu_adam is None:
        return
    value = f"{facts.cpu_adam / 1e9:.2f} G parameters/s with {facts.cpu_adam_threads} threads"
    if facts.cpu_adam_busy is not None:
        value += f", {facts.cpu_adam_busy / 1e9:.2f} while the link works"
    if len(facts.gpus) > 1:
        value += ", of one rank alone"
    best = max(facts.triad.values(), default=0.0)
    if best and facts.cpu_adam * 28 < 0.5 * best:
        cost = f"CPU speed: the update reaches {100 * facts.cpu_adam * 28 / best:.0f} % of memory bandwidth"
        advice = "give the rank more threads (--offload-cpu-threads), and look for other jobs on these cores"
        yield Finding("CPU Adam", value, "cost", cost, advice)
    else:
        yield Finding("CPU Adam", value, "good")


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts.available_bytes is None:
        yield Finding("host memory limit", "nothing limits this process: fits cannot be checked", "note")
    else:
        short, full = (facts.available_bytes / CPU_STATE_BYTES[name] / 1e9 for name in ("16-bit", "fp32"))
        value = (
            f"{facts.available_bytes / GIB:.1f} GiB free ({facts.available_source}): state of about {short:.1f} G "
            f"parameters updated by the CPU with 16-bit gradients, {full:.1f} G with fp32 ones"
        )
        if facts.gpus and facts.available_bytes < 16 * GIB * len(facts.gpus):
            cost = "model size, because there are less than 16 GiB of host memory a GPU"
            yield Finding(
                "host memory limit", value, "cost", cost, "raise the job's memory limit (--mem, cgroup, docker -m)"
            )
        else:
            yield Finding("host memory limit", value, "good")
    value = "unlimited" if facts.memlock_bytes is None else f"{facts.memlock_bytes / GIB:.2f} GiB"
    if facts.memlock_bytes is not None and facts.gpus and facts.memlock_bytes < 8 * GIB:
        cost = "pinned memory on some drivers, and then most of the link's speed"
        yield Finding("locked memory", value, "cost", cost, "ulimit -l unlimited, or docker --ulimit memlock=-1")
    else:
        yield Finding("locked memory", value, "good")


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    if not facts.huge_pages:
        yield Finding("huge pages", "unknown", "note")
    elif facts.huge_pages == "never":
        cost = "state is reserved at 4 GB/s where huge pages allow 40, and CPU Adam loses about 3 %"
        yield Finding("huge pages", "never", "cost", cost, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    else:
        yield Finding("huge pages", facts.huge_pages, "good")


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.disk_write is None:
        advice = "name a folder that can be written with --disk"
        yield Finding("disk", facts.disk_problem or "not measured", "cost", "checkpoints there", advice)
        return
    value = f"{_gb(facts.disk_write)} written and synced in {facts.disk_folder}"
    if facts.disk_write < 0.5e9:
        cost = f"{14 / (facts.disk_write / 1e9):.0f} s a checkpoint for every G parameters, because the disk is slow"
        yield Finding("disk", value, "cost", cost, "save to a faster file system, less often, or with --async-save")
    else:
        yield Finding("disk", value, "good")


def _profile(facts: Facts) -> Iterator[Finding]:
    if facts.profile_file:
        value = f"written to {facts.profile_file}; training uses it"
        if len(facts.gpus) > 1:
            value += (
                f" with one rank; with more, such as {len(facts.gpus)}, it measures at its first start, all ranks at "
                "once, since they share the host's memory"
            )
        yield Finding("hardware profile", value, "good")
    else:
        yield Finding("hardware profile", "not written", "note")
