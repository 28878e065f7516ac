"""One other system trains the plain GPT on one GPU and is timed; one process is one system.

    python -m benchmarks.peers ds_z2 [--shape 3.5b] [--micro-batch-size 1] [--num-micro-batches 1]

Systems: none (no offload, torch's fused AdamW over fp32 masters), hdo1.0 and hdo0.5 (megatron-core's
HybridDeviceOptimizer, the number is what it offloads), ds_z2 and ds_z3 (DeepSpeed's ZeRO stages with offload),
ds_ratio0.8 and ds_ratio0.5 (TwinFlow: stage 3, the number is what is offloaded), fsdp2 (torch's FSDP2 with
CPUOffloadPolicy). The last line begins with RESULT and goes on with JSON. DeepSpeed is needed for ds_* only; its first
run compiles its CPU Adam.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peer_model import PlainGPT, build_plain
from benchmarks.shapes import SHAPES, Shape

LEARNING_RATE, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0
SUB_GROUP_NUMEL = 100_000_000
PEERS = ("none", "hdo1.0", "hdo0.5", "ds_z2", "ds_z3", "ds_ratio0.8", "ds_ratio0.5", "fsdp2")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, and how many iterations: first untimed ones, then timed part by part, then as a whole.

    eval_interval: of the whole iterations; evaluations of eval_batches micro-batches are timed apart. 0: none.
    """

    shape: Shape
    micro_batch_size: int
    num_micro_batches: int
    num_warmup: int
    num_phased: int
    num_whole: int
    eval_interval: int
    eval_batches: int


class Peer:
    """A model and its optimizer behind three calls. `update` runs once an iteration."""

    def __init__(self, model: nn.Module, num_micro_batches: int, update: Callable[[], None]) -> None:
        self.model = model
        self._num_micro_batches = num_micro_batches
        self._update = update

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def backward(self, loss: Tensor) -> None:
        (loss / self._num_micro_batches).backward()

    def after_micro_batch(self) -> None:
        """Between micro-batches nothing is due."""

    def step(self) -> None:
        self._update()


class DeepSpeedPeer(Peer):
    """DeepSpeed counts micro-batches itself: its step is called after each of them."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, 1, lambda: None)

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def after_micro_batch(self) -> None:
        self.model.step()


def no_offload(model: PlainGPT, work: Workload) -> Peer:
    """Everything on the GPU: fp32 masters beside the bf16 weights, torch's fused AdamW."""
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, betas=BETAS, fused=True)

    @torch.no_grad()
    def update() -> None:
        nn.utils.clip_grad_norm_(weights, CLIP, foreach=True)
        for master, weight in zip(masters, weights):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for master, weight in zip(masters, weights):
            weight.copy_(master)
            master.grad = None

    return Peer(model, work.num_micro_batches, update)


def hybrid_device(model: PlainGPT, work: Workload, offloaded: float) -> Peer:
    """megatron-core's optimizer that keeps `offloaded` of the parameters on the CPU, its copies overlapped."""
    # Needs a GPU to be useful, and warns when it is imported.
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    weights = list(model.parameters())
    optimizer = HybridDeviceOptimizer(
        [{"params": weights}],
        offload_fraction=offloaded,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=LEARNING_RATE,
        betas=BETAS,
        fused=True,
    )

    def update() -> None:
        nn.utils.clip_grad_norm_(weights, CLIP, foreach=True)
        optimizer.step()
        for weight in weights:
            weight.grad = None

    return Peer(model, work.num_micro_batches, update)


def deepspeed_config(name: str, work: Workload) -> dict[str, Any]:
    """DeepSpeed's settings: ZeRO stage 2 or 3, optimizer on the CPU in pinned memory, communication overlapped."""
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if name.startswith("ds_ratio"):
        offload["ratio"] = float(name.removeprefix("ds_ratio"))
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch_size,
        "gradient_accumulation_steps": work.num_micro_batches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": list(BETAS)}},
        "zero_optimization": {
            "stage": 2 if name == "ds_z2" else 3,
            "offload_optimizer": offload,
            "sub_group_size": SUB_GROUP_NUMEL,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "steps_per_print": 1_000_000,
    }


def deepspeed_peer(name: str, model: PlainGPT, work: Workload) -> Peer:
    """A DeepSpeed engine over the model."""
    # Not a dependency of this project.
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(name, work))
    return DeepSpeedPeer(engine)


def fsdp2(model: PlainGPT, work: Workload, device: torch.device) -> Peer:
    """torch's FSDP2: fp32 parameters and state on the CPU, bf16 compute, fused AdamW on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = device.type == "cuda"
    # The CPU's part is needed by the clipping of gradients that live there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    settings = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if on_gpu:
        torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(model, work.num_micro_batches, update)


def build_peer(name: str, work: Workload, device: torch.device) -> tuple[Peer, int]:
    """Return the system and the number of parameters. Raises ValueError for a system that is not known."""
    if name not in PEERS:
        raise ValueError(f"{name!r} is no system that is known here, allowed are {', '.join(PEERS)}")
    model = build_plain(work.shape, device, torch.float32 if name == "fsdp2" else torch.bfloat16)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if name == "none":
        return no_offload(model, work), numel
    if name.startswith("hdo"):
        return hybrid_device(model, work, float(name.removeprefix("hdo"))), numel
    if name == "fsdp2":
        return fsdp2(model, work, device), numel
    return deepspeed_peer(name, model, work), numel


class Clock:
    """Seconds of pieces of work, the device's included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Wait for the device, then read the clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def batches(work: Workload, iteration: int, device: torch.device) -> Iterator[Tensor]:
    """Random tokens of one iteration, int64 [micro_batch_size, seq_length] each; the same for every system."""
    for index in range(work.num_micro_batches):
        generator = torch.Generator(device).manual_seed(1000 * iteration + index)
        size = (work.micro_batch_size, work.shape.seq_length)
        yield torch.randint(0, work.shape.vocab_size, size, device=device, generator=generator)


def iterate(peer: Peer, work: Workload, iteration: int, device: torch.device) -> Tensor:
    """Run one iteration; returns the last micro-batch's loss, still on the device."""
    loss = torch.zeros(())
    for tokens in batches(work, iteration, device):
        loss = peer.forward(tokens)
        peer.backward(loss)
        peer.after_micro_batch()
    peer.step()
    return loss.detach()


def iterate_phased(
    peer: Peer, work: Workload, iteration: int, device: torch.device
) -> tuple[Tensor, tuple[float, float, float]]:
    """Run one iteration; returns the loss and the seconds of forward, backward and step, the device's included."""
    clock, forward, backward, step = Clock(device), 0.0, 0.0, 0.0
    loss = torch.zeros(())
    for tokens in batches(work, iteration, device):
        marks = [clock.now()]
        loss = peer.forward(tokens)
        marks.append(clock.now())
        peer.backward(loss)
        marks.append(clock.now())
        peer.after_micro_batch()
        marks.append(clock.now())
        forward, backward, step = (total + b - a for total, a, b in zip((forward, backward, step), marks, marks[1:]))
    begin = clock.now()
    peer.step()
    return loss.detach(), (forward, backward, step + clock.now() - begin)


def evaluate(peer: Peer, work: Workload, device: torch.device) -> None:
    """Forward passes alone over `eval_batches` micro-batches."""
    with torch.no_grad():
        for index in range(work.eval_batches):
            peer.forward(next(batches(work, -1 - index, device)))


def measure(peer: Peer, work: Workload, device: torch.device) -> dict[str, Any]:
    """Train; returns milliseconds of the parts (medians), of whole iterations (all of them), and the losses."""
    clock = Clock(device)
    losses = [iterate(peer, work, i, device) for i in range(work.num_warmup)]
    parts: list[tuple[float, float, float]] = []
    for i in range(work.num_phased):
        loss, seconds = iterate_phased(peer, work, work.num_warmup + i, device)
        losses.append(loss)
        parts.append(seconds)
    whole, begin, evaluation = [], clock.now(), 0.0
    for i in range(work.num_whole):
        start = clock.now()
        losses.append(iterate(peer, work, work.num_warmup + work.num_phased + i, device))
        whole.append((clock.now() - start) * 1e3)
        if work.eval_interval and (i + 1) % work.eval_interval == 0:
            start = clock.now()
            evaluate(peer, work, device)
            evaluation += clock.now() - start
    seconds = clock.now() - begin
    names = ("forward_ms", "backward_ms", "step_ms")
    phases = {name: round(statistics.median(times) * 1e3, 1) for name, times in zip(names, zip(*parts))}
    return {
        **phases,
        "iterations_ms": [round(t, 1) for t in whole],
        "iteration_ms": round(statistics.median(whole), 1) if whole else None,
        "train_s": round(seconds, 2),
        "eval_s": round(evaluation, 2),
        "losses": [round(float(loss), 4) for loss in losses],
    }


def prepare_process(threads: int) -> None:
    """Set what the systems read from the environment, before they are imported."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS=str(threads))
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    # DeepSpeed calls ninja, which lies beside the Python that has it.
    folders = [str(Path(sys.executable).parent), str(Path(sys.prefix) / "bin")]
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    torch.set_num_threads(threads)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--shape", choices=SHAPES, default="3.5b")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--num-micro-batches", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2, help="iterations that are not timed")
    parser.add_argument("--phased", type=int, default=3, help="iterations timed part by part")
    parser.add_argument("--whole", type=int, default=4, help="iterations timed as a whole")
    parser.add_argument("--eval-interval", type=int, default=0)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--use-cpu", action="store_true", help="train on the CPU, to try the program")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    prepare_process(options.threads)
    device = torch.device("cpu" if options.use_cpu else "cuda")
    work = Workload(
        shape=SHAPES[options.shape],
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.num_micro_batches,
        num_warmup=options.warmup,
        num_phased=options.phased,
        num_whole=options.whole,
        eval_interval=options.eval_interval,
        eval_batches=options.eval_batches,
    )
    begin = time.perf_counter()
    peer, numel = build_peer(options.peer, work, device)
    start_s = time.perf_counter() - begin
    result = {"peer": options.peer, "numel": numel, "start_s": round(start_s, 1), **measure(peer, work, device)}
    if device.type == "cuda":
        result["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    result["host_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    if result.get("step_ms"):
        result["update_g_per_s"] = round(numel / result["step_ms"] / 1e6, 3)
    print("RESULT " + json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
