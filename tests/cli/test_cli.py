"""`python -m deep_offload`: what it prints, its exit codes, one sentence for nonsense, and no torch for plans."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deep_offload.cli import main
from deep_offload.model.hardware import profile_from_json, profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.plan.draw import read_trace
from deep_offload.plan.ops import OpKind

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--vocab-size", "1000")
OFFLOADED = ("--offload-resident-fraction", "0")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))


def run(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as ending:
        code = int(ending.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_plan_of_a_run_that_fits(capsys):
    """Bytes, times, a table of strategies, costs and a command to paste; exit code 0."""
    code, out, _ = run(capsys, "plan", "--model", "8b", "--profile", "h200", "--tokens", "1e9")
    assert code == 0
    for part in (
        "8.03 B parameters",
        "strategies on the same run:",
        "all on the CPU (ZeRO-Offload style)",
        "stride 2 (Deep Optimizer States style)",
        "no offload needed",
        "1e+09 tokens: 488282 iterations",
        "one checkpoint:",
        "python pretrain_gpt.py",
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336",
        "--group-query-attention --num-query-groups 8",
        "published 8B shape, 8.03 B parameters",
        "activations of a rank by recomputation: none ",
        "resident fraction 1.00",
    ):
        assert part in out
    assert "--interleaved-offload" not in out
    rows = [line for line in out.splitlines() if "bound by" in line and "GiB" in line]
    assert len(rows) == 10
    assert "2 GPUs: tensor 1 x pipeline 1 x data 2" in out


def test_plan_of_a_run_that_does_not_fit(capsys):
    """Exit code 2, bytes needed and there, and where it would fit."""
    code, out, _ = run(capsys, "plan", "--model", "20b", "--profile", "h200", "--no-alternatives", *OFFLOADED)
    assert code == 2
    assert "of host memory, but this rank has 124.00 GiB" in out and "it would fit on 2 GPU(s)" in out
    assert "pretrain_gpt.py" not in out


def test_plan_searches(capsys):
    """Auto finds the fewest GPUs, largest the most layers, and a layout is found where only a cut one fits."""
    words = ("plan", "--model", "20b", "--gpus", "auto", "--profile", "h200", "--no-alternatives", *OFFLOADED)
    code, out, _ = run(capsys, *words)
    assert code == 0 and "ranks: 2 = " in out and "torchrun --nproc-per-node 1 --nnodes 2 --rdzv-" in out
    code, out, _ = run(capsys, "plan", "--model", "8b", "--largest", "--profile", "h200")
    assert code == 0 and "largest model of this width on 1 GPU(s) of h200: " in out
    code, out, _ = run(capsys, "plan", "--model", "70b", "--gpus", "8", "--profile", "h100x8", "--no-alternatives")
    assert code == 0 and "tensor 4" in out and "--recompute-granularity full" in out


def test_plan_of_given_sizes(capsys):
    """Sizes on the command line make the model, the vocabulary is padded, and flags of the engine are kept."""
    flags = ("--offload-gpu-share", "0.25", "--offload-num-slots", "2", "--grad-buffer", "fp32", *OFFLOADED)
    code, out, _ = run(capsys, "plan", *SIZES, *flags, "--profile", "h200", "--no-alternatives")
    assert code == 0 and "GPU share 0.25" in out and "2 slots" in out and "gradient wire fp32" in out
    assert "--offload-gpu-share 0.25 --offload-resident-fraction 0.0 --offload-num-slots 2" in out
    assert "--grad-reduce-in-bf16" not in out


def test_the_printed_command_repeats_the_choice(capsys):
    """Where nothing may stay on the GPU the command gives the number of slots: training knows less when it chooses."""
    words = ("plan", "--model", "1b", "--micro-batch-size", "4", "--profile", "h200", "--no-alternatives", *OFFLOADED)

    def plan(*flags: str) -> tuple[str, list[str]]:
        code, out, _ = run(capsys, *words, *flags)
        assert code == 0
        placed = next(line for line in out.splitlines() if " subgroups of at most" in line)
        return placed, out.split("--interleaved-offload ")[1].split()

    placed, flags = plan()
    assert flags == ["--offload-resident-fraction", "0.0", "--offload-num-slots", "8"]
    assert "8 slots (" in placed and "8 slots instead of 4 shorten the iteration by" in placed
    again, same = plan(*flags)
    assert same == flags and again.split(" (the closed")[0] == placed.split(" (the closed")[0]
    placed, flags = plan("--global-batch-size", "256")
    assert "4 slots, as 8 would gain less than 2 %" in placed and flags[-2:] == ["--offload-num-slots", "4"]
    placed, flags = plan("--offload-gpu-share", "0")
    assert "--offload-num-slots" not in flags and "0 slots (" in placed


NONSENSE = [
    (("plan", "--model", "7x"), "model '7x' is unknown, known are 7b"),
    (("plan", "--model", "7b", "--gpus", "0"), "--gpus is '0', allowed are auto and whole numbers from 1"),
    (("plan", "--model", "7b", "--gpus", "²"), "--gpus is '²', allowed are auto and whole numbers from 1"),
    (("plan", "--model", "7b", "--gpus", "9" * 5000), "', allowed are auto and whole numbers from 1"),
    (("plan", "--model", "7b", "--gpus", "3", "--tensor-model-parallel-size", "2"), "--gpus 3 is not a multiple"),
    (("plan", "--model", "7b", "--gpus", "auto", "--tensor-model-parallel-size", "2"), "--gpus auto chooses"),
    (("plan", "--model", "7b", "--num-layers", "3"), "--model 7b already sets --num-layers"),
    (("plan", "--num-layers", "3"), "incomplete: give --model, or also --hidden-size"),
    (("plan", "--modle", "7b"), "--modle is unknown, did you mean --model?"),
    (("plan", "--model", "7b", "--offload-gpu-share", "1.5"), "--offload-gpu-share is 1.5, allowed are auto and numb"),
    (("plan", "--model", "7b", "--offload-gpu-share", "much"), "--offload-gpu-share"),
    (("plan", "--model", "7b", "--offload-num-slots", "0"), "--offload-num-slots is 0, allowed are auto and whole"),
    (("plan", "--model", "7b", "--offload-num-slots", "few"), "--offload-num-slots: invalid int or auto value: 'few'"),
    (
        ("plan", "--model", "7b", "--offload-device-budget-gib", "inf"),
        "--offload-device-budget-gib is inf, allowed are",
    ),
    (
        ("plan", "--model", "7b", "--offload-device-budget-gib", "nan"),
        "--offload-device-budget-gib is nan, allowed are",
    ),
    (
        ("plan", "--model", "7b", "--offload-device-budget-gib", "1e308"),
        "is 1e+308, allowed are numbers of GiB above 0",
    ),
    (("plan", "--model", "7b", "--offload-host-budget-gib", "inf"), "--offload-host-budget-gib is inf, allowed are"),
    (("plan", "--model", "7b", "--offload-host-budget-gib", "nan"), "--offload-host-budget-gib is nan, allowed are"),
    (("plan", "--model", "7b", "--offload-host-budget-gib", "-1"), "--offload-host-budget-gib is -1.0, allowed are"),
    (("plan", "--model", "7b", "--profile", "nowhere.json"), "'nowhere.json' cannot be read"),
    (("plan", "--model", "7b", "--tokens", "-5"), "--tokens is -5.0"),
    (("plan", "--model", "7b", "--tokens", "inf"), "--tokens is inf, it must be a finite number"),
    (("plan", "--model", "7b", "--tokens", "nan"), "--tokens is nan, it must be a finite number"),
    (("plan", "--model", "7b", "--global-batch-size", "0"), "--global-batch-size is 0, it must be at least 1"),
    (("plan", "--model", "7b", "--tensor-model-parallel-size", "0"), "--tensor-model-parallel-size is 0"),
    (("plan", "--model", "7b", "--pipeline-model-parallel-size", "-1"), "--pipeline-model-parallel-size is -1"),
    (("plan", "--model", "7b", "--ffn-hidden-size", "64"), "--model 7b already sets --ffn-hidden-size"),
    (("plan", "--model", "7b", "--num-query-groups", "8"), "--model 7b already sets --num-query-groups"),
    (("plan", "--model", "7b", "--kv-channels", "64"), "--model 7b already sets --kv-channels"),
    (("plan", "--model", "7b", "--tie-embeddings"), "--model 7b already sets --tie-embeddings"),
    (("plan", "--model", "7b", "--no-swiglu"), "--model 7b already sets --swiglu"),
    (("plan", "--model", "7b", "--grad-buffer", "fp16"), "--grad-buffer is 'fp16', allowed are bf16 and fp32"),
    (("plan", "--model", "7b", "--bf16", "--profile", "v100x8"), "but v100x8 does not compute in bf16: use --fp16"),
    (("plan", *SIZES, "--num-layers", "0"), "--num-layers is 0"),
    (("plan", *SIZES, "--num-layers", "10001"), "--num-layers is 10001, allowed are numbers from 1 to 10000"),
    (("plan", *SIZES, "--ffn-hidden-size", "0"), "--ffn-hidden-size is 0"),
    (("plan", *SIZES, "--hidden-size", "8"), "--ffn-hidden-size is not given, and 8/3 of --hidden-size 8 in multiples"),
    (("plan", *SIZES, "--fp16", "--offload-split-master", "on"), "but --fp16 was given: drop --fp16 or leave it at"),
    (
        ("plan", "--model", "7b", "--gpus", "auto", "--profile", "v100x8", "--offload-split-master", "on"),
        "--offload-split-master on needs bf16 parameters, but v100x8 computes in fp16: leave it at auto or off",
    ),
    (
        ("plan", "--model", "7b", "--grad-buffer", "fp32", "--offload-grad-wire", "param"),
        "but --grad-buffer is fp32: drop --grad-buffer or leave the wire at auto",
    ),
    (("plan", *SIZES, "--num-query-groups", "3"), "--num-attention-heads 8 is not a multiple of --num-query-groups 3"),
    (("plan", *SIZES, "--max-position-embeddings", "9"), "--max-position-embeddings 9 is for learned positions"),
    (("simulate", "--model", "7b", "--largest"), "--largest is a question for `plan`"),
    (("plan", "--model", "7b", "--seq-length", "0"), "--seq-length is 0"),
    (("plan", "--model", "7b", "--gpus", "2", "--global-batch-size", "3"), "--global-batch-size 3 is not a multiple"),
    (("plan", "--model", "7b", "--largest", "--gpus", "auto"), "give --gpus a number"),
    (("calibrate", "--threads", "0"), "--threads is 0"),
    (("show-plan", "--subgroups", "0"), "--subgroups and --subgroup-numel must be at least 1"),
    (("show-plan", "--gpu-share", "2"), "error: --gpu-share is 2.0, allowed are numbers from 0 to 1"),
    (("show-plan", "--resident-fraction", "nan"), "error: --resident-fraction is nan, allowed are numbers from 0 to 1"),
    (("show-plan", "--stride", "0"), "error: --stride is 0, allowed are whole numbers from 1"),
    (("show-plan", "--slots", "-1"), "error: --slots is -1, allowed are whole numbers from 1"),
    (("show-plan", "--backward-ms", "inf"), "--backward-ms is inf, it must be a finite number, 0 or more"),
    (("show-plan", "--backward-ms", "nan"), "--backward-ms is nan, it must be a finite number, 0 or more"),
    (("show-plan", "--backward-ms", "-50"), "--backward-ms is -50.0, it must be a finite number, 0 or more"),
    (("show-plan", "--forward-ms", "-50"), "--forward-ms is -50.0, it must be a finite number, 0 or more"),
    (("show-plan", "--forward-ms", "nan"), "--forward-ms is nan, it must be a finite number, 0 or more"),
    (("show-plan", "--trace", "/nonexistent/x.json"), "--trace /nonexistent/x.json cannot be written (No such file"),
    (("dance",), "dance"),
    ((), "command"),
]


@pytest.mark.parametrize(
    ("words", "message"), NONSENSE, ids=[" ".join(words)[:80] or "nothing" for words, _ in NONSENSE]
)
def test_nonsense_gets_one_sentence(capsys, words, message):
    """Exit code 2 and a sentence that names the argument and what is allowed, no traceback."""
    if "--profile" not in words and words and words[0] != "calibrate" and words[0] != "dance":
        words = (*words, "--profile", "h200")
    code, out, err = run(capsys, *words)
    assert code == 2 and message in err and "Traceback" not in err


def test_a_profile_with_a_missing_field(capsys, tmp_path):
    """A file that lacks a rate is named with the rate."""
    values = json.loads(profile_to_json(BUILT_IN_PROFILES["h200"]))
    del values["d2h_bytes_per_s"]
    (tmp_path / "p.json").write_text(json.dumps(values))
    code, _, err = run(capsys, "plan", "--model", "7b", "--profile", str(tmp_path / "p.json"))
    assert code == 2 and "lacks the field d2h_bytes_per_s" in err


ODD_FILES = {
    "more bytes than a float holds": profile_to_json(BUILT_IN_PROFILES["h200"])
    .replace(f'"gpu_memory_bytes": {139 << 30}', f'"gpu_memory_bytes": 1{"0" * 400}')
    .encode(),
    "more digits than are read": b'{"format": ' + b"9" * 5000 + b"}",
    "nested": b"[" * 100_000,
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_odd_profiles_get_one_sentence(capsys, tmp_path, kind):
    """Exit code 2 and a line that names the file or the profile; in the cache such a file is passed over."""
    path = tmp_path / "cache" / "profile-odd.json"
    path.parent.mkdir()
    path.write_bytes(ODD_FILES[kind])
    code, _, err = run(capsys, "plan", "--model", "7b", "--profile", str(path))
    assert code == 2 and err.count("\n") == 1 and len(err) < 500
    assert str(path) in err or "gpu_memory_bytes of hardware profile 'h200' is 1000" in err
    code, out, _ = run(capsys, "plan", "--model", "1b", "--no-alternatives")
    assert code == 0 and "no machine was measured yet" in out


def test_show_plan(capsys, tmp_path):
    """The lanes are drawn, every operation is listed on request, and the trace reads back."""
    trace = tmp_path / "trace.json"
    words = ("show-plan", "--subgroups", "6", "--slots", "2", "--ops", "--trace", str(trace), "--profile", "h200")
    code, out, _ = run(capsys, *words)
    assert code == 0 and "prefetch[1] @h2d slot 0" in out and " cpu |" in out and "G parameters/s" in out
    timeline = read_trace(json.loads(trace.read_text()))["simulated"]
    assert sum(span.op.kind is OpKind.FLUSH for span in timeline.spans) == 3
    code, out, _ = run(capsys, "show-plan", "--subgroups", "6", "--stride", "3", "--ops", "--profile", "gh200")
    assert code == 0 and " flush[2]" in out and " flush[1]" not in out


def test_show_plan_times_are_those_of_the_log(capsys, tmp_path):
    """An update lasts until parameters are in place, its rate too; the last flush is named; a rank works alone."""
    trace = tmp_path / "trace.json"
    words = ("show-plan", "--gpu-share", "1", "--slots", "8", "--trace", str(trace))
    code, out, _ = run(capsys, *words, "--profile", "h100x8")
    timeline = read_trace(json.loads(trace.read_text()))["simulated"]
    in_place, whole = timeline.in_place_seconds, timeline.update_seconds
    times = f"update {1e3 * in_place:.1f} ms ({1e3 * whole:.1f} with the last flush), "
    assert code == 0 and f"{times}{16 * 2**26 / in_place / 1e9:.2f} G parameters/s, iteration " in out
    assert whole > 1.2 * in_place
    assert "one rank alone: with 8 at work, one for each GPU of h100x8, each has 60 instead of 120 GB/s" in out
    assert "one rank alone" not in run(capsys, *words, "--profile", "h200")[1]


def test_calibrate_does_not_measure_in_vain(capsys, tmp_path, monkeypatch):
    """A file that cannot be written ends it at once; one that can is as it was if measuring fails."""
    measure = pytest.importorskip("deep_offload.runtime.measure")

    def fail(*_unused):
        raise ValueError("measured")

    monkeypatch.setattr(measure, "measure_profile", fail)
    words = ("calibrate", "--use-cpu", "--threads", "1", "--output")
    for path, why in (("/nonexistent/x.json", "No such file or directory"), (str(tmp_path), "Is a directory")):
        code, _, err = run(capsys, *words, path)
        assert code == 2 and f"error: --output {path} cannot be written ({why}): give another file" in err
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    for path in (kept, tmp_path / "new.json"):
        assert "error: measured" in run(capsys, *words, str(path))[2]
    assert kept.read_text() == "kept" and not (tmp_path / "new.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk(capsys, monkeypatch):
    """What fails only when it is written gets one sentence as well."""
    measure = pytest.importorskip("deep_offload.runtime.measure")
    monkeypatch.setattr(measure, "measure_profile", lambda *_unused: BUILT_IN_PROFILES["h200"])
    for words in (("calibrate", "--use-cpu", "--output"), ("show-plan", "--profile", "h200", "--trace")):
        code, _, err = run(capsys, *words, "/dev/full")
        assert code == 2 and f"{words[-1]} /dev/full cannot be written (No space left on device)" in err


def test_calibrate_writes_what_plan_reads(capsys, tmp_path, monkeypatch):
    """calibrate keeps this machine's profile, writes the file asked for, and plan then uses it."""
    measure = pytest.importorskip("deep_offload.runtime.measure")

    def fake(device, num_threads, num_ranks=1, *_unused):
        machine = measure.fingerprint(device, num_threads, num_ranks)
        return replace(BUILT_IN_PROFILES["h200"], name="mine", fingerprint=machine)

    monkeypatch.setattr(measure, "measure_profile", fake)
    output = tmp_path / "mine.json"
    code, out, _ = run(capsys, "calibrate", "--use-cpu", "--threads", "1", "--output", str(output))
    assert code == 0 and profile_from_json(output.read_text()).name == "mine"
    code, out, _ = run(capsys, "plan", "--model", "1b", "--no-alternatives")
    assert code == 0 and "hardware profile measured before" in out and "hardware: mine" in out


@pytest.mark.parametrize("flags", [(), OFFLOADED], ids=["auto", "more slots tried"])
def test_plan_needs_no_torch_and_little_time(flags):
    """A 20 B plan with its table runs without torch or numpy in under 2 s of processor time."""
    program = (
        "import sys, time\n"
        "from deep_offload.cli import main\n"
        "code = main(['plan', '--model', '20b', '--gpus', '4', '--profile', 'h100x4', *sys.argv[1:]])\n"
        "heavy = [name for name in ('torch', 'numpy', 'megatron', 'triton') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert code == 0\n"
        "print('seconds', time.process_time())\n"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 2.0, f"{time.perf_counter() - start:.1f} s of wall clock"


def test_help_lists_the_commands(capsys):
    """--help names every command and ends with code 0."""
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in ("plan", "calibrate", "show-plan"))
