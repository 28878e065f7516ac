"""`InterleavedAdamW`: the engine as a plain `torch.optim.Optimizer` for any PyTorch script."""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from deep_offload.config import OffloadConfig
from deep_offload.kernels.reference import HOLD
from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.build import build_engine
from deep_offload.optimizer.engine import STATE_NAMES, OffloadEngine
from deep_offload.optimizer.flat_params import flatten_params, local
from deep_offload.optimizer.grad_norm import counted_runs, sum_of_squares
from deep_offload.optimizer.small_copies import read
from deep_offload.optimizer.torch_state import NOT_TAKEN_OVER, check_loadable, fingerprint
from deep_offload.optimizer.verify import UpdateCheck
from deep_offload.plan.storage import MASTER


class InterleavedAdamW(torch.optim.Optimizer):
    """AdamW with its state in host memory, updated on CPU and GPU at once; bits do not depend on the placement.

    params: parameters or groups, each with its own lr, betas, eps and weight_decay; all on one device. Their storage
    moves into flat buffers that this optimizer owns: shapes, values and the Parameter objects stay, `p.data` becomes
    a view.
    offload: placement (default: offload everything, the model picks share and slots). max_grad_norm: clip the global
    norm inside the update, without touching `p.grad`; `last_grad_norm` is the norm before clipping. loss_scale:
    gradients are divided by it; needed for fp16 parameters. flush_in_backward: copy gradients to the host while
    backward goes on; use it where one backward makes a step and one process trains, and change no gradient through
    `.grad.data`, which torch does not record. A gradient that is not finite skips the step when max_grad_norm or
    loss_scale is given.

    Parameters that FSDP2's `fully_shard` has sharded are updated in place, each rank its part, clipped by the norm of
    all parts. Their state dict holds this rank's parts; make the optimizer after `fully_shard`.

    Host memory and threads are released by `close()`, or when nobody holds the optimizer any more.

    A parameter written between steps by in-place operations refreshes its master; after writing through `p.data`, which
    torch does not record, call `refresh_masters()`. A parameter whose grad is None is skipped, like in torch.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        offload: OffloadConfig | None = None,
        max_grad_norm: float | None = None,
        loss_scale: float | None = None,
        flush_in_backward: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._is_built = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.max_grad_norm = max_grad_norm
        self.loss_scale = loss_scale
        self.last_grad_norm: float | None = None
        self.num_skipped_steps = 0
        self._flush_in_backward = flush_in_backward
        self._params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        _check_params(self._params, loss_scale)
        self._number = {p: number for number, p in enumerate(self._params)}
        with torch.no_grad():
            self._flat = flatten_params(self._params)
        config = offload or OffloadConfig(interleaved_offload=True, offload_resident_fraction=0.0)
        self._engine, self.placement_lines = build_engine(
            self._flat.shards, config, warn=warnings.warn, log=log or (lambda _line: None)
        )
        self._check = UpdateCheck(self._engine, config.offload_verify_interval)
        self._num_updates = 0
        self._steps = [0] * len(self._params)
        self._flushed_version: dict[int, int] = {}
        self._loaded: dict[int, bytes] = {}
        """Fingerprints of the weights that came with a state, until the next step."""
        self._hooks = [p.register_post_accumulate_grad_hook(_hook_of(self, n)) for n, p in enumerate(self._params)]
        self._remember_versions()
        self._release = weakref.finalize(self, _release, self._check, self._engine, os.getpid())
        self._release.atexit = False
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_built", False):
            raise ValueError(
                "a parameter group was added after construction, but state is laid out once: give all groups to "
                "the constructor"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the parameters' gradients; returns the closure's loss. Parameters are in place afterwards."""
        if not self._release.alive:
            raise RuntimeError("step() was called on an optimizer that is closed: build a new one")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_written_params()
        self._collect_grads()
        scale = self._grad_scale()
        if scale is None:
            self.num_skipped_steps += 1
            self._engine.skip_update()
            return loss
        classes, class_of = self._classes()
        if classes:
            self._num_updates += 1
            self._check.before(self._num_updates)
            self._engine.update(classes, class_of, scale)
            self._check.after(self._num_updates)
            self._engine.wait_until_reusable()
            self._write_sharded_params([n for n, p in enumerate(self._params) if p.grad is not None])
        else:
            self._engine.skip_update()
        self._flushed_version.clear()
        self._loaded.clear()
        self._remember_versions()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.wait_until_reusable()  # write after read: lanes may still read the gradients
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Make every master equal to its parameter's present value."""
        self._engine.synchronize()
        self._take_in_all()
        self._loaded.clear()
        for i in range(len(self._engine.layout.subgroups)):
            self._engine.refresh_master(i)
        self._remember_versions()

    def synchronize(self) -> None:
        """Wait for all lanes."""
        self._engine.synchronize()

    def close(self) -> None:
        """End the lanes and release host memory; the parameters stay usable. Once is enough, twice does no harm."""
        for hook in self._hooks:
            hook.remove()
        self._release()

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes moved and parameters updated since the start, by lane."""
        return self._engine.traffic

    @property
    def engine(self) -> OffloadEngine:
        return self._engine

    # -- state dict ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's layout: per parameter `step`, `exp_avg`, `exp_avg_sq` and `master`, fp32 on the CPU (copies)."""
        self._engine.synchronize()
        packed = super().state_dict()
        ids = [i for group in packed["param_groups"] for i in group["params"]]
        every = [p for group in self.param_groups for p in group["params"]]
        packed["state"] = {
            i: self._param_state(self._number[p]) for i, p in zip(ids, every, strict=True) if p in self._number
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a `torch.optim.AdamW` state: without `master`, masters follow the
        parameters.

        Before or after the model's own weights, as long as they are those of the state. Raises ValueError, with nothing
        changed, for the state of another model, of another kind of optimizer, or of another number of ranks.
        """
        check_loadable(state_dict, self.param_groups, self._number)
        self._engine.synchronize()
        self._take_in_all()
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved_group.items() if k not in NOT_TAKEN_OVER})
            for p, saved_id in zip(group["params"], saved_group["params"], strict=True):
                if p in self._number:
                    self._load_param(self._number[p], state_dict["state"].get(saved_id))
        self._write_sharded_params(range(len(self._params)))
        self._loaded = {number: fingerprint(self._home(number)) for number in range(len(self._params))}
        self._remember_versions()

    def _param_state(self, number: int) -> dict[str, torch.Tensor]:
        p = local(self._params[number])
        state = {name: torch.empty(p.numel(), dtype=torch.float32) for name in STATE_NAMES}
        for i, offset, start, count in self._pieces(number):
            for name, tensor in self._engine.read_state(i).items():
                state[name][start : start + count].copy_(tensor[offset : offset + count])
        out = {name: tensor.view(p.shape) for name, tensor in state.items()}
        return {"step": torch.tensor(float(self._steps[number])), **out}

    def _load_param(self, number: int, saved: dict[str, Any] | None) -> None:
        p = local(self._params[number])
        self._steps[number] = int(saved["step"]) if saved else 0
        for i, offset, start, count in self._pieces(number):
            for name in STATE_NAMES:
                if saved is not None and name in saved:
                    values = local(saved[name]).reshape(-1)[start : start + count].to(torch.float32)
                    self._engine.write_state(i, name, offset, values)
                elif name == MASTER:
                    self._engine.refresh_master(i, offset, offset + count)
                else:
                    self._engine.write_state(i, name, offset, torch.zeros(count))
        assert p.numel() == sum(count for *_, count in self._pieces(number))

    # -- inside -------------------------------------------------------------------------------------------------

    def _pieces(self, number: int) -> list[tuple[int, int, int, int]]:
        """(subgroup, offset in it, start in the flat parameter, elements) of a parameter."""
        shard, start = self._flat.where[number]
        end = start + local(self._params[number]).numel()
        pieces = []
        for s in self._engine.subgroups_of(shard, start, end):
            low, high = max(s.start, start), min(s.start + s.numel, end)
            pieces.append((s.index, low - s.start, low - start, high - low))
        return pieces

    def _grad_accumulated(self, number: int) -> None:
        """In backward, when a parameter has its gradient."""
        p, view = self._params[number], self._flat.grad_views[number]
        if self._flat.is_sharded[number] or (p.grad is not None and p.grad.is_sparse):
            return  # FSDP's reduction may still run on another stream, a sparse gradient is refused: both in `step`
        if p.grad is not None and p.grad.data_ptr() != view.data_ptr():
            self._engine.wait_until_reusable()  # write after read: lanes may still read the last gradient
            view.copy_(p.grad)
            p.grad = view
        if self._flush_in_backward and not self._is_one_of_several():
            self._flush(number)

    def _is_one_of_several(self) -> bool:
        """Whether other ranks will change the gradients behind backward, which torch need not record: says so once."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return False
        self._flush_in_backward = False
        warnings.warn(
            f"flush_in_backward is off: gradients of {dist.get_world_size()} ranks are reduced after they are "
            "accumulated, and what was flushed before would miss it",
            stacklevel=2,
        )
        return True

    def _flush(self, number: int) -> None:
        """Start the flush of subgroups whose parameters all have their gradients."""
        if number in self._flushed_version:  # a second backward adds to it: what was flushed is stale
            self._engine.skip_update()
            self._flushed_version.clear()
        self._flushed_version[number] = self._flat.grad_views[number]._version
        for i, *_ in self._pieces(number):
            if all(other in self._flushed_version for other in self._members(i)):
                self._engine.grads_ready(i)

    def _members(self, i: int) -> list[int]:
        s = self._engine.layout.subgroups[i]
        segments = self._flat.shards[s.shard].segments
        return [g.param for g in segments if g.start < s.start + s.numel and s.start < g.end]

    def _collect_grads(self) -> None:
        """Bring gradients that the user replaced or edited into the flat buffer, and drop flushes that missed an
        edit."""
        self._refuse_unfrozen()
        for number, p in enumerate(self._params):
            view = self._flat.grad_views[number]
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} is sparse: only dense ones are updated"
                )
            if self._flat.is_sharded[number]:
                view.copy_(local(p.grad))
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
                p.grad = view
        stale = [n for n, version in self._flushed_version.items() if self._flat.grad_views[n]._version != version]
        if stale:
            self._engine.skip_update()

    def _grad_scale(self) -> float | None:
        """The multiplier of every gradient, or None if a gradient is not finite."""
        scale = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale
        if self.max_grad_norm is None and self.loss_scale is None:
            return scale
        total = self._sum_of_squares(sharded=False)
        if self._flat.group is not None:
            parts = self._sum_of_squares(sharded=True)
            dist.all_reduce(parts, group=self._flat.group)
            total += parts
        norm = math.sqrt(squares) if math.isfinite(squares := read(total)) else squares
        self.last_grad_norm = norm * scale
        if not math.isfinite(self.last_grad_norm):
            return None
        if self.max_grad_norm is None:
            return scale
        return min(1.0, self.max_grad_norm / (self.last_grad_norm + 1e-6)) * scale

    def _sum_of_squares(self, sharded: bool) -> torch.Tensor:
        """fp64 [1]: of this rank's gradients, of the parameters that are sharded or of those that are not."""
        runs = counted_runs(
            [
                [
                    (
                        s.start,
                        s.end,
                        self._params[s.param].grad is not None and self._flat.is_sharded[s.param] == sharded,
                    )
                    for s in x.segments
                ]
                for x in self._flat.shards
            ]
        )
        grads = [s.grad for s in self._flat.shards]
        return sum_of_squares(grads, runs, self._engine.device)

    def _classes(self) -> tuple[list[AdamClass], list[int]]:
        classes: dict[AdamClass, int] = {}
        class_of = [HOLD] * len(self._params)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p not in self._number:
                    continue
                number = self._number[p]
                self._steps[number] += 1
                adam = AdamClass(
                    lr=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=self._steps[number],
                )
                class_of[number] = classes.setdefault(adam, len(classes))
        return list(classes), class_of

    def _refuse_unfrozen(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is not None and p not in self._number:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} has a gradient, but it was frozen when the optimizer "
                        "was built and has no state: build a new optimizer after unfreezing"
                    )

    def _follow_written_params(self) -> None:
        for number, p in enumerate(self._params):
            is_moved = not self._flat.is_sharded[number] and p.data_ptr() != self._home(number).data_ptr()
            if not is_moved and local(p)._version == self._versions[number]:
                continue
            self._take_in(number)
            if number in self._loaded and self._loaded[number] == fingerprint(self._home(number)):
                continue  # the model's weights were loaded behind the optimizer's state: their masters are more exact
            for i, offset, _start, count in self._pieces(number):
                self._engine.refresh_master(i, offset, offset + count)

    def _take_in(self, number: int) -> None:
        """Bring a parameter's value to its place in the flat buffer."""
        p, home = self._params[number], self._home(number)
        if self._flat.is_sharded[number]:
            home.copy_(local(p))
        elif p.data_ptr() != home.data_ptr():  # `p.data = other`: take its value in and come home
            home.copy_(p)
            p.data = home

    def _take_in_all(self) -> None:
        for number in range(len(self._params)):
            self._take_in(number)

    def _remember_versions(self) -> None:
        self._versions = [local(p)._version for p in self._params]

    def _home(self, number: int) -> torch.Tensor:
        """The parameter's view in the flat buffer, in the shape that it has on this rank."""
        shard, start = self._flat.where[number]
        shape = local(self._params[number]).shape
        return self._flat.shards[shard].param[start : start + shape.numel()].view(shape)

    def _write_sharded_params(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._flat.is_sharded[number]:
                local(self._params[number]).copy_(self._home(number))


def _hook_of(optimizer: InterleavedAdamW, number: int) -> Callable[[torch.nn.Parameter], None]:
    """A hook of a parameter, which does not keep the optimizer."""
    known = weakref.ref(optimizer)

    def hook(_p: torch.nn.Parameter) -> None:
        alive = known()
        if alive is not None:
            alive._grad_accumulated(number)

    return hook


def _release(check: UpdateCheck, engine: OffloadEngine, process: int) -> None:
    """End the lanes of the process that started them; the garbage collector may call this anywhere."""
    if os.getpid() != process:  # a fork has copies of the memory, and no lanes that could be waited for
        return
    if engine.is_on_a_lane():  # which cannot wait for its own end
        threading.Thread(target=_release, args=(check, engine, process)).start()
        return
    if engine.device.type == "cuda":
        with torch.cuda.device(engine.device):
            _close(check, engine)
    else:
        _close(check, engine)


def _close(check: UpdateCheck, engine: OffloadEngine) -> None:
    check.close()
    engine.close()


def _check_params(params: list[torch.nn.Parameter], loss_scale: float | None) -> None:
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(f"parameters are on {sorted(map(str, devices))}, they must be on one device")
    for p in params:
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype}, allowed are float32, bfloat16 and float16"
            )
        if p.dtype == torch.float16 and loss_scale is None:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is float16 and no loss_scale was given: its gradients "
                f"would underflow, so "
                "scale the loss and pass loss_scale, or use bfloat16"
            )
