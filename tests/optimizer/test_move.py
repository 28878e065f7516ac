"""Subgroups that move between CPU and GPU while a run goes on keep every bit, and move the bytes of their new place."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import (
    ALL_RESIDENT,
    Case,
    assert_same_bits,
    bits,
    drive,
    make_engine,
    make_model,
)

from deep_offload.optimizer.engine import STATE_NAMES
from deep_offload.plan.ops import Place
from deep_offload.plan.placement import gpu_share_of, place_among, place_by_share, spread
from deep_offload.runtime import convert, moves

NUM_UPDATES = 8
TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, fp32 gradients": (torch.bfloat16, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
}


def moved(engine, share):
    """The engine's residents, and this share of all others streamed."""
    placement = engine.settings.placement
    offloaded = [i for i, place in enumerate(placement) if place is not Place.RESIDENT]
    return place_among(placement, offloaded, round((1 - share) * len(offloaded)))


def drive_moving(case, shares, look=None, grow=None):
    """As `drive`, but before step s the GPU's share becomes shares[s]; look(step, engine) sees each step's end."""

    def move(step, engine):
        if step in shares:
            engine.move(moved(engine, shares[step]))
        if step == grow:
            engine.keep_resident(len(engine.layout.subgroups) // 2)

    return drive(case, NUM_UPDATES, before=move, after=look)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("wire", ["fp32", "param"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "full"])
def test_moves_change_no_bit(kind, wire, split):
    """Up, down and to and fro, to all and from none, beside residents and before more of them: the bits of the
    all-resident run."""
    dtype, grad_dtype = TYPES[kind]
    common = dict(dtype=dtype, grad_dtype=grad_dtype, wire=wire, split=split, accumulation=2, reserve=True, slots=3)
    want = drive(Case(**ALL_RESIDENT, **common), NUM_UPDATES)
    for start in (dict(share=0.5), dict(share=0.7, resident=0.3), dict(share=0.9)):
        case = Case(**start, **common)
        for shares in ({3: 1.0}, {3: 0.0, 6: 0.6}, {2: 0.3, 3: 0.8, 5: 0.2, 7: 0.9}):
            assert_same_bits(drive_moving(case, shares), want, f"{case} {shares}")
    assert_same_bits(drive_moving(case, {3: 0.4, 7: 0.1}, grow=5), want, "with growth between moves")


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_masters_are_converted_in_pieces(piece, monkeypatch):
    """A master's two forms share their bytes: pieces of any size, converted in order, lose none of them."""
    case = Case(share=0.5, reserve=True)
    want = drive(case, NUM_UPDATES)
    monkeypatch.setattr(convert, "PIECE_NUMEL", piece)
    assert_same_bits(drive_moving(case, {3: 0.1, 5: 1.0, 6: 0.5}), want, f"pieces of {piece}")


class LargestConversion(TorchDispatchMode):
    """Sees how many elements the conversions from one type to another give at most."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_conversions_take_no_more_than_a_piece(piece, monkeypatch):
    """Masters that are made of weights, and low halves of new residents, need no memory by the subgroup's size."""
    case = Case(share=0.5, reserve=True)
    want, model = drive(case, NUM_UPDATES), make_model(case)
    monkeypatch.setattr(convert, "PIECE_NUMEL", piece)
    with LargestConversion() as seen:
        grown = make_engine(case, model)
        try:
            grown.keep_resident(len(grown.layout.subgroups))
        finally:
            grown.close()
    assert seen.numel == min(piece, grown.layout.max_subgroup_numel)
    assert_same_bits(drive_moving(case, {3: 0.1}, grow=5), want, f"pieces of {piece}")


def test_a_master_that_is_not_converted_is_noticed():
    """The comparison fails where a master keeps its old form, or pieces are converted in the wrong order."""
    case = Case(share=0.5, reserve=True)
    want = drive(case, NUM_UPDATES)

    def differs(got):
        return any(not torch.equal(bits(got[name]), bits(want[name])) for name in want)

    for forgotten in ("_split", "_join"):
        with mock.patch.object(moves, forgotten, lambda *_unused: None):
            assert differs(drive_moving(case, {3: 0.2, 5: 0.9})), forgotten
    forward = convert.pieces
    with (
        mock.patch.object(convert, "PIECE_NUMEL", 7),
        mock.patch.object(convert, "pieces", lambda numel, size: forward(numel, size)[::-1]),
    ):
        assert differs(drive_moving(case, {3: 0.2, 5: 0.9}))


def test_bytes_follow_the_placement():
    """Counters go on over a move and grow by what a run that always had that placement moves; memory stays."""
    seen = {}

    def look(step, engine):
        engine.synchronize()
        seen[step] = engine.traffic, engine.host_bytes, engine.device_bytes, engine.settings.num_slots

    case = Case(share=0.5, reserve=True, slots=3)

    def per_step(last):
        return {name: seen[last][0][name] - seen[last - 1][0][name] for name in seen[last][0]}

    drive_moving(case, {4: 0.8, 6: 0.2}, look)
    steps = {share: per_step(step) for share, step in ((0.5, 3), (0.8, 5), (0.2, 8))}
    memory = {entry[1:] for entry in seen.values()}
    assert len(memory) == 1, "neither host nor device memory changes"
    for share, got in steps.items():
        seen.clear()
        drive_moving(case, {1: share}, look)
        assert per_step(6) == got
    assert steps[0.8]["gpu_params"] > steps[0.5]["gpu_params"] > steps[0.2]["gpu_params"] > 0
    assert steps[0.2]["cpu_params"] > steps[0.5]["cpu_params"] > steps[0.8]["cpu_params"] > 0


def test_without_a_reserve_only_upward():
    """A subgroup that was streamed from the start has no host memory for the CPU's update; one that comes back has."""
    case = Case(share=0.5)
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        start = engine.settings.placement
        on_cpu = [i for i, place in enumerate(start) if place is Place.CPU]
        assert not engine.can_move(moved(engine, 0.2))
        up = place_among(start, on_cpu, len(on_cpu) // 2)
        assert gpu_share_of(up) > gpu_share_of(start) and engine.can_move(up)
        engine.move(up)
        assert engine.can_move(start) and not engine.can_move(moved(engine, 0.0))
        residents = (Place.RESIDENT, *start[1:])
        assert not engine.can_move(residents)
    finally:
        engine.close()


def test_slots_and_upcasts_are_what_they_were():
    """Without slots nothing is streamed; without the buffer for upcasts nothing goes to the CPU in fp32; with fewer
    slots than asked for a plan uses those."""
    for case, share in ((Case(share=0.0, reserve=True), 0.5), (Case(share=1.0, reserve=True), 0.5)):
        engine = make_engine(case, make_model(case))
        assert not engine.can_move(moved(engine, share))
        engine.close()
    case = Case(share=0.05, slots=4, reserve=True)
    want = drive(case, NUM_UPDATES)
    used = []
    got = drive_moving(case, {3: 0.7}, lambda _step, engine: used.append((engine.plan.num_slots, engine.device_bytes)))
    assert_same_bits(got, want, "few slots")
    assert [n for n, _ in used[2:]] == [1] * (NUM_UPDATES - 2) and len({size for _, size in used}) == 1


def test_no_memory_changes_nothing():
    """Where a conversion finds no room the engine says so and goes on with the same bits and placement."""
    case = Case(share=0.5, reserve=True)
    want = drive(case, NUM_UPDATES)

    def refused(*_unused):
        raise torch.OutOfMemoryError("no room")

    def look(step, engine):
        if step == 3:
            engine.synchronize()  # lanes split masters too
            before = engine.settings, engine.plan
            with mock.patch.object(moves.reference, "split_master", refused), pytest.raises(torch.OutOfMemoryError):
                engine.move(moved(engine, 0.9))
            assert (engine.settings, engine.plan) == before

    assert_same_bits(drive_moving(case, {}, look), want, "after a refusal")


def test_state_is_readable_and_writable_after_a_move():
    """What a checkpoint reads and a load writes is the place's own form, right after a move."""
    case = Case(share=0.5, reserve=True)
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        for share in (0.9, 0.2):
            values = {name: [] for name in STATE_NAMES}
            for s in engine.layout.subgroups:
                for k, name in enumerate(STATE_NAMES):
                    generator = torch.Generator().manual_seed(3 * s.index + k)
                    values[name].append(torch.rand(s.numel, generator=generator))
                    engine.write_state(s.index, name, 0, values[name][-1])
            engine.move(moved(engine, share))
            for s in engine.layout.subgroups:
                for name, found in engine.read_state(s.index).items():
                    assert torch.equal(bits(found), bits(values[name][s.index])), (share, s.index, name)
    finally:
        engine.close()


def test_place_among():
    """Even spread, residents untouched, everything else streamed."""
    start = place_by_share(12, 0.5, 0.25)
    movable = [i for i, place in enumerate(start) if place is Place.CPU]
    for count in range(len(movable) + 1):
        got = place_among(start, movable, count)
        assert [p is Place.RESIDENT for p in got] == [p is Place.RESIDENT for p in start]
        assert got.count(Place.CPU) == count and all(got[i] is not Place.CPU for i in range(12) if i not in movable)
    assert place_among(start, movable, len(movable)) == start
    assert spread([], 0) == [] and spread([3, 5, 8, 9], 2) == [5, 9]
