"""The Megatron front end: `MegatronOptimizer`'s interface over the engine, on DDP's flat buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import param_is_not_shared

from deep_offload.kernels.scalars import AdamClass
from deep_offload.model.memory import DeviceBytes
from deep_offload.model.trace import Expectation, UpdateFacts
from deep_offload.optimizer.checkpoint import CHECKPOINT_KEYS, SHARDING_TYPE, sharded_param_state
from deep_offload.optimizer.checkpoint_state import ParamState
from deep_offload.optimizer.digest import DigestEntry, EntryHasher, combine
from deep_offload.optimizer.engine import STATE_NAMES, OffloadEngine
from deep_offload.optimizer.follow import PlacementFollower
from deep_offload.optimizer.grad_norm import Run, counted_runs, sum_of_squares
from deep_offload.optimizer.megatron_buffers import BufferMap
from deep_offload.optimizer.megatron_names import full_tensor, is_hashed_here, named_params
from deep_offload.optimizer.megatron_passes import TrainingPasses
from deep_offload.optimizer.ranks import from_all_ranks
from deep_offload.optimizer.residency import ResidentGrowth
from deep_offload.optimizer.small_copies import read
from deep_offload.optimizer.verify import UpdateCheck
from deep_offload.plan.layout import Subgroup
from deep_offload.plan.storage import MASTER
from deep_offload.plan.timeline import Timeline


@dataclass(slots=True)
class ParamGroups:
    """What `MegatronOptimizer` calls its inner optimizer: groups that the learning rate scheduler drives."""

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]


class DeepOffloadOptimizer(MegatronOptimizer):
    """Adam with state placed by the engine. Every offload setting gives the bits of the all-resident run."""

    is_stub_optimizer = False

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[DistributedDataParallel],
        param_groups: list[dict[str, Any]],
        buffers: BufferMap,
        engine: OffloadEngine,
        lines: Sequence[str],
        verify_interval: int = 0,
        growth: ResidentGrowth | None = None,
        follower: PlacementFollower | None = None,
    ) -> None:
        """verify_interval: see `UpdateCheck`; growth, follower: None where the placement stays as it is."""
        super().__init__(ParamGroups(param_groups, {}), config)
        self._chunks = list(chunks)
        self._buffers = buffers
        self._engine = engine
        self._lines = tuple(lines)
        self._step = 0
        self.before_update: Callable[[], None] | None = None
        """Called before state and parameters change: a checkpoint's writer may still be reading them."""
        self._device = torch.device(buffers.shards[0].shard.grad.device if buffers.shards else "cpu")
        number_of = buffers.number_of()
        self._group_of = [-1] * len(buffers.params)
        for index, group in enumerate(param_groups):
            for param in group["params"]:
                self._group_of[number_of[param]] = index
        self._runs = _runs(buffers, counted=True)
        self._copies = _runs(buffers, counted=False)
        self._passes = TrainingPasses(chunks, buffers, engine)
        self._check = UpdateCheck(engine, verify_interval)
        self._growth = growth
        self._follower = follower or PlacementFollower(engine, lambda _line: None, may_move=False)
        self._scaler = _grad_scaler(config, self._device)
        self._judged: tuple[Timeline, Expectation, UpdateFacts | None] | None = None

    # -- a step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> tuple[bool, float, int | None]:
        """Update from the final gradients in DDP's buffers: (updated?, gradient norm before clipping, zero gradients).

        A norm that is not finite on any rank skips the step on all of them and leaves state untouched. Returns when the
        work is with the lanes; `zero_grad` or `synchronize` waits for it.
        """
        self._engine.marks.end_of_backward()
        self._passes.end_of_backward()
        num_zeros = self._count_zeros() if self.config.log_num_zeros_in_grad else None
        scale = self._loss_scale()
        norm = self._grad_norm() / scale
        is_finite = math.isfinite(norm)
        if self._growth is not None:
            self._growth.count_step()
        if self._scaler is not None:
            self._scaler.update(not is_finite)
        if not is_finite:
            self._engine.skip_update()
            return False, norm, num_zeros
        clip = self.config.clip_grad
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self._step += 1
        self._passes.is_settled = False
        if self.before_update is not None:
            self.before_update()
        self._check.before(self._step)
        self._engine.update([self._adam_class(g) for g in self.param_groups], self._group_of, coefficient / scale)
        self._follower.count_update()
        self._check.after(self._step)
        return True, norm, num_zeros

    def drop_gradients(self) -> None:
        """Leave `step` out after a backward pass, of which gradients may have been flushed: another one may follow."""
        self._passes.end_of_backward()
        self._engine.skip_update()

    def begin_step(self) -> None:
        """Start an iteration in place of `zero_grad` and DDP's `zero_grad_buffer`; waits for as little as possible.

        Each module's forward pass waits for its own parameters, and gradients are zeroed when the last chunk's first
        forward pass ends: no backward pass begins before, not even of another chunk. Where gathers of parameters are
        not overlapped, all of it happens here.
        """
        self._adapt_placement()
        self._engine.marks.begin()
        self._passes.begin_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Wait until gradients may be overwritten and parameters are in place on all ranks; call it before DDP
        zeroes, in loops that do not use `begin_step`."""
        self._adapt_placement()
        self._engine.marks.begin()
        self._passes.settle()

    @torch.no_grad()
    def _adapt_placement(self) -> None:
        """Once the first steps have shown their peak, and once updates were measured: nothing of an iteration is under
        way here. All ranks come to this at the same steps, so that they may synchronize."""
        if self._growth is not None and self._growth.is_due:
            self._settle_state()
            lines = self._growth.grow()
            if lines:
                self._lines = tuple(lines)
                self._follower.forget()
        self._follower.look()
        if self._follower.is_due:
            self._settle_state()
            self._lines = tuple(self._follower.follow()) or self._lines

    def _settle_state(self) -> None:
        """Make state final, and let nobody read it where it lies so far: a checkpoint's writer may be doing so."""
        self.synchronize()
        if self.before_update is not None:
            self.before_update()

    def synchronize(self) -> None:
        """Make state and parameters final: before evaluation, checkpoints, exit."""
        self._passes.leave()
        self._engine.synchronize()

    def close(self) -> None:
        """Finish all work and release host memory."""
        self._check.close()
        self._engine.close()

    def _adam_class(self, group: dict[str, Any]) -> AdamClass:
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        return AdamClass(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=self.config.adam_eps,
            weight_decay=group["weight_decay"],
            step=self._step,
            decoupled=self.config.decoupled_weight_decay,
        )

    def _grad_norm(self) -> float:
        """Norm of the scaled gradients, not finite where any is not, in copies that do not count too."""
        grads = [b.shard.grad for b in self._buffers.shards]
        total = sum_of_squares(grads, self._runs, self._device)
        if self._copies:
            total += 0.0 * sum_of_squares(grads, self._copies, self._device)
        dist.all_reduce(total)
        squares = read(total)
        return math.sqrt(squares) if math.isfinite(squares) else squares

    def _count_zeros(self) -> int:
        total = torch.zeros(1, dtype=torch.int64, device=self._device)
        for shard, start, end in _runs(self._buffers, counted=True, padding=False):
            total += (self._buffers.shards[shard].shard.grad[start:end] == 0).sum()
        dist.all_reduce(total)
        return int(read(total))

    # -- MegatronOptimizer's other calls ------------------------------------------------------------------------

    def get_loss_scale(self) -> torch.Tensor:
        """fp32 [1] on the device; 1 without fp16."""
        if self._scaler is None:
            return torch.ones(1, dtype=torch.float32, device=self._device)
        return self._scaler.scale

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else read(self._scaler.scale)

    def prepare_grads(self) -> bool:
        """True if a gradient is not finite. Gradients stay in DDP's buffers: nothing is copied."""
        return not math.isfinite(self._grad_norm())

    def step_with_ready_grads(self) -> bool:
        return self.step()[0]

    def get_grad_norm(self) -> float:
        return self._grad_norm() / self._loss_scale()

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return list(self._buffers.params)

    def count_zeros(self) -> int:
        return self._count_zeros()

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Masters follow the parameters that were written into the model since; the moments stay."""
        if state_dict is not None:
            raise ValueError(
                "masters are refreshed from the model's own parameters; load the state dict into the model first"
            )
        self.synchronize()
        for i in range(len(self._engine.layout.subgroups)):
            self._engine.refresh_master(i)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Step, groups without their parameters, loss scaler and, by subgroup, fp32 state of this rank's shards
        (copies)."""
        self.synchronize()
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        state = [
            {name: t.detach().to("cpu", copy=True) for name, t in self._engine.read_state(i).items()}
            for i in range(len(self._engine.layout.subgroups))
        ]
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"step": self._step, "param_groups": groups, "grad_scaler": scaler, "shards": self._by_shard(state)}

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: dict | None = None
    ) -> dict[str, Any]:
        """State for `megatron.core.dist_checkpointing`, in its fully reshardable format; a collective over data ranks.

        Load it, then give the loaded dict to `load_sharded_state_dict`.
        """
        self.synchronize()
        read = None
        if not is_loading:
            read = self._gather
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {
            "optimizer": {"step": self._step, "param_groups": groups},
            "grad_scaler": scaler,
            "param_state": sharded_param_state(model_sharded_state_dict, self._buffers.params, read),
            "param_state_sharding_type": SHARDING_TYPE,
        }

    @torch.no_grad()
    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in what dist_checkpointing loaded for `sharded_state_dict(is_loading=True)`; weights follow the
        masters."""
        self.synchronize()
        self._step = state_dict["optimizer"]["step"]
        for group, saved in zip(self.param_groups, state_dict["optimizer"]["param_groups"], strict=True):
            group.update(saved)
        self._load_scaler(state_dict["grad_scaler"])
        for number in range(len(self._buffers.params)):
            for name, key in CHECKPOINT_KEYS.items():
                full = state_dict["param_state"][number][key].reshape(-1)
                for s, low, high, at in self._ranges(number):
                    self._engine.write_state(s.index, name, low - s.start, full[at : at + high - low])
        self._passes.is_settled = False

    @property
    def param_state(self) -> ParamState:
        """This rank's own ranges of weights and state, for checkpoints. Call `synchronize` first."""
        return ParamState(self._buffers, self._engine)

    @property
    def num_steps(self) -> int:
        """Updates so far, which Adam's bias correction counts."""
        return self._step

    def scaler_state(self) -> dict[str, Any] | None:
        """The loss scaler's numbers; None without one."""
        return None if self._scaler is None else self._scaler.state_dict()

    def resume(self, num_steps: int, scaler_state: dict[str, Any] | None) -> None:
        """After `param_state` was written: go on after `num_steps` updates; all ranks then gather the new weights."""
        self._step = num_steps
        self._load_scaler(scaler_state)
        self._passes.is_settled = False

    def _load_scaler(self, state: dict[str, Any] | None) -> None:
        """Go on with a dynamic scale. A constant one stays as it is set, and what it saved is no dynamic one's."""
        if isinstance(self._scaler, DynamicGradScaler) and state and "growth_tracker" in state:
            # Not its own load_state_dict, which calls for a GPU.
            self._scaler._scale = torch.as_tensor(state["scale"], dtype=torch.float32).to(self._device)
            self._scaler._growth_tracker = int(state["growth_tracker"])
            self._scaler._hysteresis_tracker = int(state["hysteresis_tracker"])

    def _by_shard(self, state: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Flat state of whole shards, so that a load may cut them into other subgroups."""
        shards: list[dict[str, torch.Tensor]] = []
        for number, bucket in enumerate(self._buffers.shards):
            arrays = {name: torch.empty(bucket.shard.grad.numel(), dtype=torch.float32) for name in STATE_NAMES}
            for s in self._engine.layout.subgroups:
                if s.shard == number:
                    for name in STATE_NAMES:
                        arrays[name][s.start : s.start + s.numel] = state[s.index][name]
            shards.append(arrays)
        return shards

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict` for the same parallel layout; placement and subgroups may differ."""
        sizes = [b.shard.grad.numel() for b in self._buffers.shards]
        given = [shard[MASTER].numel() for shard in state_dict["shards"]]
        if sizes != given:
            raise ValueError(
                f"the state holds shards of {given} elements, this rank's are {sizes}: load it with the "
                f"parallel layout and "
                "bucket size it was saved with"
            )
        self.synchronize()
        self._step = state_dict["step"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self._load_scaler(state_dict["grad_scaler"])
        for s in self._engine.layout.subgroups:
            for name in STATE_NAMES:
                values = state_dict["shards"][s.shard][name][s.start : s.start + s.numel]
                self._engine.write_state(s.index, name, 0, values)
        self._passes.is_settled = False

    # -- what is ours -------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """How state is placed, for the log at start; after a change, how it is placed since."""
        return list(self._lines)

    def last_step_fields(self) -> list[tuple[str, str]]:
        """Fields for the end of the log line."""
        fields = [("offload wait (ms)", f"{self._engine.wait_seconds * 1e3:.1f}")]
        update = self.last_update()
        if update is not None:
            fields.append(("offload update", str(update)))
        return fields

    def last_update(self) -> UpdateFacts | None:
        """How the last complete update did; None where nothing is offloaded, or before one is complete."""
        timeline, expected = self._engine.finished_timeline(), self._engine.expected
        if timeline is None or expected is None:
            return None
        if self._judged is None or self._judged[0] is not timeline or self._judged[1] is not expected:
            self._judged = timeline, expected, expected.judge(timeline)
        return self._judged[2]

    @property
    def wait_seconds(self) -> float:
        """Seconds that the training loop waited for the last update."""
        return self._engine.wait_seconds

    @property
    def waits_in_passes(self) -> bool:
        """Whether `wait_seconds` pass inside forward passes, so that timers of these count them as well."""
        return self._passes.waits_in_passes

    @property
    def expected(self) -> Expectation | None:
        """What the placement was chosen by; None where nothing is offloaded."""
        return self._engine.expected

    def keep_timelines(self, num_steps: int) -> None:
        """Keep the lanes of the last `num_steps` steps for `timelines`, with forward and backward passes."""
        self._engine.keep_timelines(num_steps)
        self._engine.marks.watch(self._chunks)

    def timelines(self) -> list[Timeline]:
        """Measured lanes of the steps that were kept, on one clock; synchronizes."""
        return self._engine.timelines()

    def traffic(self) -> dict[str, int]:
        """Bytes and parameters by lane since the start."""
        return self._engine.traffic

    def timeline(self) -> Timeline | None:
        """Measured lanes of the last step."""
        return self._engine.timeline()

    def memory_bytes(self) -> tuple[int, int]:
        """(host, device) bytes of optimizer state and staging on this rank."""
        return self._engine.host_bytes, self._engine.device_bytes

    def planned_bytes(self) -> tuple[int, DeviceBytes]:
        """Bytes of the same on the host and on the device, as the placement predicts them."""
        return self._engine.planned_bytes

    def state_digest(self, vocab_size: int | None = None) -> str:
        """The digest of the whole model's parameters and state; a collective over all ranks."""
        return combine(self.state_entries(vocab_size), self._step)

    @torch.no_grad()
    def state_entries(self, vocab_size: int | None = None) -> list[DigestEntry]:
        """What the digest is made of, from all ranks: every parameter's weights, master and moments, hashed."""
        self.synchronize()
        number_of = self._buffers.number_of()
        hasher = EntryHasher()
        trained = [named for named in named_params(self._chunks) if not named.is_tied_copy]
        for index, named in enumerate(trained):
            mine = is_hashed_here(named, index, self._buffers.shards[0].group)
            for kind, name in (("param", None), *zip(STATE_NAMES, STATE_NAMES)):
                full = full_tensor(named, self._gather(number_of[named.param], name), vocab_size)
                if mine:
                    hasher.add(named.name, kind, full)
        return sorted(set(_all_entries(hasher.finish())))

    def _ranges(self, number: int) -> Iterator[tuple[Subgroup, int, int, int]]:
        """This rank's ranges of a parameter: (subgroup, start and end in its shard, start in the flat parameter)."""
        for piece in self._buffers.pieces[number]:
            end = piece.shard_start + piece.numel
            for s in self._engine.subgroups_of(piece.shard, piece.shard_start, end):
                low, high = max(s.start, piece.shard_start), min(s.start + s.numel, end)
                yield s, low, high, piece.param_start + low - piece.shard_start

    def _gather(self, number: int, name: str | None) -> torch.Tensor:
        """A parameter's tensor on this model-parallel rank, from all data-parallel ranks: of a state, or its
        weights."""
        param = self._buffers.params[number]
        flat = torch.zeros(param.numel(), dtype=param.dtype if name is None else torch.float32, device=self._device)
        for s, low, high, at in self._ranges(number):
            source = self._buffers.shards[s.shard].shard.param[low:high]
            if name is not None:
                source = self._engine.read_state(s.index, low - s.start, high - s.start, (name,), self._device)[name]
            flat[at : at + high - low].copy_(source)
        group = self._buffers.shards[0].group
        if group.size() > 1:  # pieces are disjoint, the rest is zero: a sum of bytes keeps every bit
            dist.all_reduce(flat.view(torch.uint8), group=group)
        return flat.view(param.shape)


def _all_entries(local: list[DigestEntry]) -> list[DigestEntry]:
    return [entry for entries in from_all_ranks(local) for entry in entries]


def _runs(buffers: BufferMap, *, counted: bool, padding: bool = True) -> list[Run]:
    """Elements that count towards norm and zeros on this rank, or those that do not: copies on other tensor-parallel
    ranks and of tied embeddings.

    padding: whether runs may reach over padding between parameters, which is zero.
    """
    chosen = [
        (param_is_not_shared(p) and tensor_parallel.param_is_not_tensor_parallel_duplicate(p)) == counted
        for p in buffers.params
    ]
    pieces = [[(s.start, s.end, chosen[s.param]) for s in b.shard.segments] for b in buffers.shards]
    if padding:
        return counted_runs(pieces)
    return [(shard, start, end) for shard, p in enumerate(pieces) for start, end, is_chosen in p if is_chosen]


def _grad_scaler(config: OptimizerConfig, device: torch.device) -> MegatronGradScaler | None:
    """Megatron's loss scaler: constant if a scale is given, dynamic for fp16, none otherwise."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
