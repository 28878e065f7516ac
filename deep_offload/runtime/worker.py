"""What each operation does to the tensors of its subgroup. Decides nothing: order and placement are the plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.kernels import reference
from deep_offload.plan.layout import MasterStorage
from deep_offload.plan.ops import Op, OpKind
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER, WEIGHT_OUT
from deep_offload.runtime.lanes import Handler
from deep_offload.runtime.state import Arrays, DeviceState, HostState, StatePlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one update needs besides state: set before `norm_ready`, read by the lanes after it.

    scalars: fp32 [num_classes, NUM_SCALARS] on the host, scalars_device: the same on the device. segments[i]: int64
    [k, 3] rows (start, end, class) of subgroup i; segments_device[i]: what the device's kernel takes. grad_scale:
    the one
    multiplier of every gradient (loss scale, clipping, averaging). decoupled: AdamW, else Adam with L2.
    """

    scalars: torch.Tensor
    scalars_device: torch.Tensor
    segments: Sequence[torch.Tensor]
    segments_device: Sequence[object]
    grad_scale: float
    decoupled: bool


@dataclass(slots=True)
class Traffic:
    """Counters since the start; each is written by one lane only. Bytes over the link, parameters updated."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    cpu_params: int = 0
    gpu_params: int = 0
    upcast_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class DeviceBuffers:
    """Views of the training loop's flat buffers, one per subgroup: weights[i] and grads[i], each [numel]."""

    weights: list[torch.Tensor]
    grads: list[torch.Tensor]


class SubgroupWorker:
    """Handlers of all work ops. They run on the lanes' threads; the plan's edges keep them apart."""

    def __init__(
        self,
        plan: StatePlan,
        host: HostState,
        device_state: DeviceState,
        buffers: DeviceBuffers,
        num_threads: int,
        traffic: Traffic | None = None,
    ) -> None:
        """traffic: counters to go on with; None: new ones."""
        self._plan = plan
        self._subgroups = plan.layout.subgroups
        self._storage = [plan.storage(s) for s in self._subgroups]
        self._host = host.arrays
        self._resident = device_state.resident
        self._slots = device_state.slots
        self._buffers = buffers
        self._num_threads = num_threads
        self.traffic = traffic or Traffic()
        self.inputs: StepInputs | None = None
        self._device = buffers.grads[0].device if buffers.grads else torch.device("cpu")
        self._update_device = _device_update(self._device)
        self._upcast = device_state.upcast

    @property
    def handlers(self) -> dict[OpKind, Handler]:
        return {
            OpKind.GRAD_FLUSH: self.grad_flush,
            OpKind.PREFETCH: self.prefetch,
            OpKind.UPDATE_CPU: self.update_cpu,
            OpKind.UPDATE_GPU: self.update_gpu,
            OpKind.FLUSH: self.flush,
            OpKind.PARAM_H2D: self.param_h2d,
        }

    def _upcasts(self, i: int) -> bool:
        host = self._host[i]
        return GRAD in host and host[GRAD].dtype != self._buffers.grads[i].dtype

    def grad_flush(self, op: Op) -> int:
        """Device gradient to the pinned host buffer; a 16-bit one is upcast on the device first when the wire is
        fp32."""
        target, source = self._host[op.subgroup][GRAD], self._buffers.grads[op.subgroup]
        if self._upcasts(op.subgroup):
            assert self._upcast is not None
            for start in range(0, source.numel(), self._upcast.numel()):
                end = min(start + self._upcast.numel(), source.numel())
                staged = self._upcast[: end - start]
                staged.copy_(source[start:end])
                target[start:end].copy_(staged, non_blocking=True)
            self.traffic.upcast_bytes += target.nbytes
        else:
            target.copy_(source, non_blocking=True)
        self.traffic.d2h_bytes += target.nbytes
        return target.nbytes

    def prefetch(self, op: Op) -> int:
        moved = 0
        for staged, home in self._staged_pairs(op):
            staged.copy_(home, non_blocking=True)
            moved += home.nbytes
        self.traffic.h2d_bytes += moved
        return moved

    def flush(self, op: Op) -> int:
        moved = 0
        for staged, home in self._staged_pairs(op):
            home.copy_(staged, non_blocking=True)
            moved += home.nbytes
        self.traffic.d2h_bytes += moved
        return moved

    def update_cpu(self, op: Op) -> int:
        inputs, host = self._inputs(), self._host[op.subgroup]
        cpu_kernels.adam_update(
            host[MASTER],
            host[EXP_AVG],
            host[EXP_AVG_SQ],
            host[GRAD],
            self._weight_out(op.subgroup),
            inputs.segments[op.subgroup],
            inputs.scalars,
            inputs.grad_scale,
            inputs.decoupled,
            self._num_threads,
        )
        self.traffic.cpu_params += host[MASTER].numel()
        return 0

    def update_gpu(self, op: Op) -> int:
        inputs, i = self._inputs(), op.subgroup
        arrays = self._resident[i] if op.slot is None else self._staged(op)
        self._update_device(
            arrays.get(MASTER),
            arrays[EXP_AVG],
            arrays[EXP_AVG_SQ],
            self._buffers.grads[i],
            self._buffers.weights[i],
            inputs.segments_device[i],
            inputs.scalars_device,
            inputs.grad_scale,
            self._storage[i],
            inputs.decoupled,
        )
        self.traffic.gpu_params += arrays[EXP_AVG].numel()
        return 0

    def update_copy(self, i: int, state: Arrays, grad: torch.Tensor, *, on_device: bool) -> None:
        """The last step's update of subgroup i on copies: fp32 state and its gradient, on the device or the host."""
        inputs = self._inputs()
        arrays = state[MASTER], state[EXP_AVG], state[EXP_AVG_SQ], grad, None
        if on_device:
            scalars, segments = inputs.scalars_device, inputs.segments_device[i]
            rest = segments, scalars, inputs.grad_scale, MasterStorage.FULL, inputs.decoupled
            self._update_device(*arrays, *rest)
        else:
            rest = inputs.segments[i], inputs.scalars, inputs.grad_scale, inputs.decoupled, self._num_threads
            cpu_kernels.adam_update(*arrays, *rest)

    def param_h2d(self, op: Op) -> int:
        source = self._weight_out(op.subgroup)
        if source is None:  # an fp32 parameter is its master
            source = self._host[op.subgroup][MASTER]
        self._buffers.weights[op.subgroup].copy_(source, non_blocking=True)
        self.traffic.h2d_bytes += source.nbytes
        return source.nbytes

    def _inputs(self) -> StepInputs:
        assert self.inputs is not None
        return self.inputs

    def _weight_out(self, i: int) -> torch.Tensor | None:
        """Where the CPU writes the rounded weights: their own array, or over the gradient of the same width."""
        host = self._host[i]
        if WEIGHT_OUT in host:
            return host[WEIGHT_OUT]
        weight = self._buffers.weights[i]
        return host[GRAD].view(weight.dtype) if weight.dtype.itemsize == 2 else None

    def _staged(self, op: Op) -> Arrays:
        """Views of the op's slot with the sizes and types of its subgroup."""
        assert op.slot is not None
        slot, numel, storage = self._slots[op.slot], self._subgroups[op.subgroup].numel, self._storage[op.subgroup]
        arrays = {EXP_AVG: slot[EXP_AVG][:numel], EXP_AVG_SQ: slot[EXP_AVG_SQ][:numel]}
        if storage is not MasterStorage.WEIGHT:
            dtype = torch.int16 if storage is MasterStorage.SPLIT else torch.float32
            arrays[MASTER] = slot[MASTER][: numel * dtype.itemsize].view(dtype)
        return arrays

    def _staged_pairs(self, op: Op) -> list[tuple[torch.Tensor, torch.Tensor]]:
        home = self._host[op.subgroup]
        return [(staged, home[name]) for name, staged in self._staged(op).items()]


def _device_update(device: torch.device) -> Callable[..., None]:
    """The device's kernel: Triton on a GPU, the specification itself without one."""
    if device.type == "cuda":
        from deep_offload.kernels import gpu  # optional heavy import: triton

        return gpu.adam_update
    return reference.adam_update
