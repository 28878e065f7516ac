"""What the compiled kernel refuses, the instruction set in use, threads and the probes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from deep_offload.kernels import cpu, reference
from tests.kernels.kernel_cases import assert_same_bits, ordinary_state, run_cpu, table

ROOT = Path(__file__).resolve().parents[2]
NUMEL = 64


def arguments(**changes) -> dict:
    """Right arguments for 64 elements, with some replaced."""
    state = ordinary_state(NUMEL, torch.bfloat16)
    values = dict(
        master=state.master, exp_avg=state.exp_avg, exp_avg_sq=state.exp_avg_sq, grad=state.grad,
        weight=torch.zeros(NUMEL, dtype=torch.bfloat16), segments=reference.one_segment(NUMEL), scalars=table(),
        grad_scale=1.0, decoupled=True, num_threads=1, isa=None,
    )  # fmt: skip
    return {**values, **changes}


BLOCK = torch.zeros(4 * NUMEL)  # one piece of memory for overlapping arguments
HALVES = torch.zeros(4 * NUMEL, dtype=torch.bfloat16)
OVERLAP = "only a 16-bit weight may lie over a gradient, and then exactly over a 16-bit one"

REFUSED = {
    "master dtype": (dict(master=torch.zeros(NUMEL, dtype=torch.float64)),
        "master: expected a contiguous CPU tensor of float32 with 1 dimension(s), got float64"),
    "exp_avg dtype": (dict(exp_avg=torch.zeros(NUMEL, dtype=torch.bfloat16)),
        "exp_avg: expected a contiguous CPU tensor of float32 with 1 dimension(s), got bfloat16"),
    "exp_avg_sq no tensor": (dict(exp_avg_sq=[0.0] * NUMEL),
        "exp_avg_sq: expected a contiguous CPU tensor of float32 with 1 dimension(s), got <class 'list'>"),
    "grad dtype": (dict(grad=torch.zeros(NUMEL, dtype=torch.int16)),
        "grad: expected a contiguous CPU tensor of float32 or bfloat16 or float16 with 1 dimension(s), got int16"),
    "weight dtype": (dict(weight=torch.zeros(NUMEL, dtype=torch.float64)),
        "weight: expected a contiguous CPU tensor of float32 or bfloat16 or float16 with 1 dimension(s), got float64"),
    "not contiguous": (dict(exp_avg=torch.zeros(2 * NUMEL)[::2]),
        "exp_avg: expected a contiguous CPU tensor of float32 with 1 dimension(s), "
        "got one that is not contiguous (an update of a copy would be lost)"),
    "two dimensions": (dict(master=torch.zeros(8, 8)),
        "master: expected a contiguous CPU tensor of float32 with 1 dimension(s), got torch.Size([8, 8])"),
    "device": (dict(grad=torch.zeros(NUMEL, device="meta")),
        "grad: expected a contiguous CPU tensor of float32 or bfloat16 or float16 with 1 dimension(s), "
        "got a tensor on meta"),
    "size": (dict(exp_avg_sq=torch.zeros(NUMEL - 1)), "exp_avg_sq: expected 64 elements as in master, got 63"),
    "weight size": (dict(weight=torch.zeros(NUMEL + 1)), "weight: expected 64 elements as in master, got 65"),
    "moments overlap": (dict(exp_avg=BLOCK[:NUMEL], exp_avg_sq=BLOCK[NUMEL - 1 : 2 * NUMEL - 1]),
        f"exp_avg_sq: it overlaps exp_avg in memory; {OVERLAP}"),
    "fp32 gradient is the master": (dict(master=BLOCK[:NUMEL], grad=BLOCK[:NUMEL]),
        f"grad: it overlaps master in memory; {OVERLAP}"),
    "weight beside its gradient": (dict(grad=HALVES[:NUMEL], weight=HALVES[1 : NUMEL + 1]),
        f"weight: it overlaps grad in memory; {OVERLAP}"),
    "fp32 weight over fp32 gradient": (dict(grad=BLOCK[:NUMEL], weight=BLOCK[:NUMEL]),
        f"weight: it overlaps grad in memory; {OVERLAP}"),
    "weight over a moment": (dict(exp_avg=BLOCK[:NUMEL], weight=BLOCK.view(torch.bfloat16)[:NUMEL]),
        f"weight: it overlaps exp_avg in memory; {OVERLAP}"),
    "segments dtype": (dict(segments=torch.zeros(1, 3, dtype=torch.int32)),
        "segments: expected a contiguous CPU tensor of int64 with 2 dimension(s), got int32"),
    "segments shape": (dict(segments=torch.zeros(1, 2, dtype=torch.int64)),
        "segments: expected rows of (start, end, class), got shape torch.Size([1, 2])"),
    "segments start": (dict(segments=torch.tensor([[1, 64, 0]])),
        "segments: row 0 is (1, 64, 0); it must start at 0 and not be empty"),
    "segments gap": (dict(segments=torch.tensor([[0, 10, 0], [11, 64, 0]])),
        "segments: row 1 is (11, 64, 0); it must start at 10 and not be empty"),
    "segments order": (dict(segments=torch.tensor([[0, 10, 0], [10, 10, 0], [10, 64, 0]])),
        "segments: row 1 is (10, 10, 0); it must start at 10 and not be empty"),
    "segments short": (dict(segments=torch.tensor([[0, 63, 0]])),
        "segments: they end at 63; they must cover all 64 elements"),
    "segments long": (dict(segments=torch.tensor([[0, 65, 0]])),
        "segments: they end at 65; they must cover all 64 elements"),
    "segments none": (dict(segments=torch.zeros(0, 3, dtype=torch.int64)),
        "segments: they end at 0; they must cover all 64 elements"),
    "class": (dict(segments=torch.tensor([[0, 64, 2]])),
        "segments: row 0 is (0, 64, 2); scalars has 2 rows, so the class must be 0 to 1, or -1 to hold"),
    "class below": (dict(segments=torch.tensor([[0, 64, -2]])),
        "segments: row 0 is (0, 64, -2); scalars has 2 rows, so the class must be 0 to 1, or -1 to hold"),
    "scalars dtype": (dict(scalars=table().double()),
        "scalars: expected a contiguous CPU tensor of float32 with 2 dimension(s), got float64"),
    "scalars shape": (dict(scalars=table()[:, :8].contiguous()),
        "scalars: expected rows of 9 values, got shape torch.Size([2, 8])"),
    "threads": (dict(num_threads=0), "num_threads: expected 1 to 4096, got 0"),
    "isa unknown": (dict(isa="sse9"),
        f"isa: 'sse9' is no instruction set that this machine and build support; use one of "
        f"{', '.join(cpu.supported_isas())}"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_written(changes, sentence):
    """Each wrong argument raises one sentence that names it, before any state is touched."""
    given = arguments(**changes)
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor) and
              value.device.type == "cpu"}  # fmt: skip
    with pytest.raises(ValueError, match="^" + re.escape(sentence) + "$"):
        cpu.adam_update(**given)
    for name, value in before.items():
        assert torch.equal(given[name], value), name


def test_an_empty_subgroup_is_allowed():
    """No elements and no segments: nothing happens."""
    nothing = torch.zeros(0)
    cpu.adam_update(
        nothing, nothing.clone(), nothing.clone(), nothing.clone(), None, torch.zeros(0, 3, dtype=torch.int64),
        table(), 1.0, True, 2,
    )  # fmt: skip


def test_the_environment_forces_an_instruction_set(monkeypatch):
    """DEEP_OFFLOAD_ISA chooses, an empty value does not, and the default is the best supported one."""
    for isa in cpu.supported_isas():
        monkeypatch.setenv("DEEP_OFFLOAD_ISA", isa)
        assert cpu.selected_isa() == isa
    monkeypatch.setenv("DEEP_OFFLOAD_ISA", "")
    assert cpu.selected_isa() == cpu.supported_isas()[0]


def test_an_unknown_instruction_set_in_the_environment_is_refused(monkeypatch):
    """An unknown DEEP_OFFLOAD_ISA stops the update instead of falling back, and names what is supported."""
    monkeypatch.setenv("DEEP_OFFLOAD_ISA", "doesnotexist")
    sentence = (
        "DEEP_OFFLOAD_ISA: 'doesnotexist' is no instruction set that this machine and build support; "
        f"use one of {', '.join(cpu.supported_isas())}"
    )
    for call in (cpu.selected_isa, lambda: cpu.adam_update(**arguments())):
        with pytest.raises(ValueError, match="^" + re.escape(sentence) + "$"):
            call()


def test_every_build_has_the_portable_and_the_scalar_set():
    """The oracle and the plain C++ version exist everywhere, after the wider ones."""
    assert cpu.supported_isas()[-2:] == ("portable", "scalar")


def test_a_missing_extension_says_how_to_build_it():
    """Without the compiled module the error is one sentence with the command that builds it."""
    program = (
        "import sys; sys.modules['deep_offload._C'] = None\n"
        "from deep_offload.kernels import cpu\n"
        "try: cpu.supported_isas()\n"
        "except cpu.ExtensionMissingError as error: print(isinstance(error, ImportError), error)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert output.startswith("True the compiled module deep_offload._C cannot be imported (")
    assert "build it with `pip install -e .` or `python setup.py build_ext --inplace`" in output


def test_the_thread_count_is_the_one_given_not_the_environments():
    """With OMP_NUM_THREADS=1, as torchrun exports it, num_threads=3 still runs three threads."""
    program = (
        "import os, torch\n"
        "from deep_offload.kernels import cpu\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "a, b, c = (torch.zeros(100_000) for _ in range(3))\n"
        "before = count(); cpu.triad_seconds(a, b, c, 3); print(count() - before)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip
    assert output.strip() == "2"


def test_the_gil_is_released():
    """Python goes on while an update runs in another thread."""
    state = ordinary_state(1 << 21, torch.float32)
    worker = threading.Thread(target=run_cpu, args=(state, None, "scalar"))
    turns, longest, last = 0, 0.0, time.perf_counter()
    worker.start()
    started = time.perf_counter()
    while worker.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        turns, longest, last = turns + 1, max(longest, now - last), now
    assert turns >= 5
    assert longest < 0.9 * (time.perf_counter() - started)


def test_first_touch_zeroes_exactly_what_it_is_given():
    """Any number of bytes at any offset that is a multiple of four is zeroed, and nothing beside it."""
    for start, end, num_threads in ((0, 4, 1), (4, 1003, 2), (64, 300_001, 3)):
        memory = torch.ones(310_000, dtype=torch.uint8)
        cpu.first_touch(memory[start:end], num_threads)
        assert int(memory[start:end].sum()) == 0
        assert bool((memory[:start] == 1).all()) and bool((memory[end:] == 1).all())
    with pytest.raises(ValueError, match="^memory: expected a contiguous CPU tensor"):
        cpu.first_touch(torch.ones(10, device="meta"), 1)


def test_the_triad_computes_and_takes_time():
    """The triad probe writes b + 3 * c and returns seconds."""
    b, c = torch.randn(10_003), torch.randn(10_003)
    a = torch.empty(10_003)
    assert cpu.triad_seconds(a, b, c, 2) > 0.0
    assert_same_bits(a, b + 3.0 * c, "triad")
    with pytest.raises(ValueError, match="^c: expected 10003 elements as in a, got 4$"):
        cpu.triad_seconds(a, b, torch.zeros(4), 1)


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_the_pattern_moves_what_the_update_moves(isa):
    """The pattern probe reads four arrays and writes three and the weight: each takes on its neighbor's values."""
    state = ordinary_state(70_001, torch.bfloat16)
    new, weight = state.copy(), torch.zeros(70_001, dtype=torch.bfloat16)
    arrays = (new.master, new.exp_avg, new.exp_avg_sq, new.grad)
    assert cpu.adam_pattern_seconds(*arrays, weight, 2, isa) > 0.0
    assert_same_bits(new.master, state.exp_avg, "master")
    assert_same_bits(new.exp_avg, state.exp_avg_sq, "exp_avg")
    assert_same_bits(new.exp_avg_sq, state.grad.float(), "exp_avg_sq")
    assert_same_bits(weight, reference.round_to(state.exp_avg, torch.bfloat16), "weight")
