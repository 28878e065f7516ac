"""What `plan` ends with is the run that it planned, and what it says beside it."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deep_offload.cli import _build_parser, main, offload_config
from deep_offload.cli_command import PLACEHOLDERS
from deep_offload.cli_plan import _short, layout_of
from deep_offload.cli_request import request_from
from deep_offload.config import OffloadConfig
from deep_offload.model.dry_run import dry_run_report
from deep_offload.model.hardware import profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES, load_profile
from megatron.training.arguments import build_config
from megatron.training.dry_run import run_shape

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000"
FILLED = {"MASTER_ADDR": "10.0.0.1", "DATA_PATH": "a/b", "TOKENIZER": "t", "TRAIN_ITERS": "10", "LR": "1e-4"}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))


def plan(capsys, words: str) -> tuple[int, str]:
    code = main(["plan", *words.split()])
    return code, capsys.readouterr().out


def pasted(out: str) -> list[str]:
    """The words of the printed command with everything filled in that the line above it names."""
    head, text = out.split("\n\nto train it, with ")[1].split(" filled in:\n")
    assert set(FILLED) == set(PLACEHOLDERS)
    for name in head.split(", "):
        text = text.replace(f" {name}", f" {FILLED[name]}")
    words = shlex.split(text.replace("\\\n", " "))  # as a shell joins lines
    assert not [word for word in words if word.isupper()]
    return words


CASES = [
    "--model 7b --profile h200",
    "--model 1b --profile h200 --offload-resident-fraction 0 --tokens 1e9",
    "--model 20b --gpus 4 --profile h100x4 --global-batch-size 8",
    "--model 20b --gpus auto --profile h200 --offload-resident-fraction 0",
    "--model 70b --gpus 12 --profile h100x8",
    "--model 70b --gpus 8 --profile h100x8 --recompute selective --grad-buffer fp32 --tensor-model-parallel-size 8",
    "--model 7b --gpus 8 --profile v100x8",
    "--model 1b --profile h200 --fp16 --grad-buffer fp32",
    "--model 1b --profile h200 --offload-split-master off",
    "--model 1b --profile h200 --offload-device-budget-gib 40 --offload-subgroup-numel 1000000",
    f"{SIZES} --profile h200 --no-swiglu --normalization LayerNorm --add-bias-linear --tie-embeddings "
    "--position-embedding-type learned_absolute --max-position-embeddings 4096",
    f"{SIZES} --profile h200 --num-query-groups 2 --kv-channels 32 --position-embedding-type none",
    f"{SIZES} --profile h200 --position-embedding-type learned_absolute --micro-batch-size 2 --swiglu",
]


@pytest.mark.parametrize("words", CASES)
def test_the_command_is_the_planned_run(capsys, words):
    """Parsed as pretrain_gpt.py does, it is the very run whose bytes and times are printed, offloaded or not."""
    code, out = plan(capsys, f"{words} --no-alternatives")
    assert code == 0
    arguments = _build_parser().parse_args(["plan", *words.split()])
    profile = load_profile(arguments.profile)
    request = request_from(arguments, offload_config(arguments), profile)
    run = layout_of(request)
    got = pasted(out)
    start = got.index("pretrain_gpt.py")
    config = build_config(got[start + 1 :], world_size=run.parallel.world_size)
    assert run_shape(config) == run
    assert config.model.attention_dropout == config.model.hidden_dropout == 0
    lines = out.splitlines()
    placed = next(line for line in lines if " subgroups of at most" in line)
    is_changed = request.config != OffloadConfig(interleaved_offload=True)
    assert config.offload.interleaved_offload == (" 0 on the CPU, 0 streamed" not in placed or is_changed)
    if config.offload.interleaved_offload:
        given = replace(request.config, offload_num_slots=config.offload.offload_num_slots)
        assert config.offload == given
    # Its own dry run, by the same rates, counts the same bytes.
    again = [line for line in dry_run_report(run_shape(config), config.offload, profile).lines if " bytes of a" in line]
    assert again and again == [line for line in lines if " bytes of a" in line]
    ranks = run.parallel.world_size
    if ranks > 1:
        nodes = int(got[got.index("--nnodes") + 1]) if "--nnodes" in got else 1
        assert int(got[got.index("--nproc-per-node") + 1]) * nodes == ranks


def test_the_length_follows_from_the_tokens(capsys):
    """With --tokens the command holds the iterations that the budget allows."""
    _, out = plan(capsys, "--model 1b --profile h200 --no-alternatives --tokens 1e9")
    assert "--train-iters 488282 " in out and "TRAIN_ITERS" not in out


def test_a_faster_cut_is_said(capsys):
    """Columns of batch and tokens per second, and a line where another cut of the same GPUs and batch is faster."""
    code, out = plan(capsys, "--model 20b --gpus 4 --profile h100x4")
    assert code == 0 and out.count("batch  tokens/s/GPU") == 2
    (line,) = [line for line in out.splitlines() if line.startswith("faster than")]
    assert "4 GPUs: tensor 2 x pipeline 1 x data 2, 3387 instead of 1702 tokens/s/GPU" in line
    assert "communication inside its layers (tensor parallel) is not counted" in line
    assert "needs 108.55 GiB of GPU memory, but 76.00 GiB of a single h100x4 GPU are usable" in out
    _, out = plan(capsys, "--model 20b --gpus 4 --profile h100x4 --tensor-model-parallel-size 2")
    assert "faster than" not in out


ADVISED = [
    "--model 20b --gpus 4 --profile h100x4",
    "--model 20b --gpus 4 --profile h100x4 --global-batch-size 8",
    "--model 20b --gpus 8 --profile h100x8 --recompute full --global-batch-size 16",
    "--model 13b --gpus 8 --profile v100x8",
]
NOT_ADVISED = [
    "--model 7b --gpus 4 --profile h100x4 --tensor-model-parallel-size 2 --global-batch-size 4",
    "--model 7b --gpus 4 --profile h100x4 --tensor-model-parallel-size 2 --global-batch-size 2",
]


@pytest.mark.parametrize("words", ADVISED + NOT_ADVISED)
def test_the_advised_flags_are_faster(capsys, words):
    """A plan with the advised flags has the same GPUs and batch and a shorter iteration; nothing else is advised."""

    def facts(out: str) -> tuple[str, str, float]:
        batch, ranks = out.split("global batch ")[1].split()[0], out.split("ranks: ")[1].split()[0]
        iteration = float(out.split("predicted iteration: ")[1].split(" ms")[0])
        return batch, ranks, iteration

    _, out = plan(capsys, words)
    found = [line for line in out.splitlines() if line.startswith("faster than")]
    if words in NOT_ADVISED:
        rows = [line.split(" ms ")[-1].split()[0] for line in out.splitlines() if line.startswith("4 GPUs:")]
        assert not found and rows and set(rows) == {words.split()[-1]}, "rows of the same GPUs have the run's own batch"
        assert "no strategy is faster" in out and "nothing is faster" not in out
        return
    flags = found[0].rsplit("(", 1)[1].rstrip(")").split()
    model = words.split()[:2] + words[words.index("--profile") :].split()[:2]
    code, again = plan(capsys, " ".join([*model, *flags, "--no-alternatives"]))
    assert code == 0 and facts(again)[:2] == facts(out)[:2] and facts(again)[2] < facts(out)[2]


def test_the_deepest_model_as_cut(capsys):
    """--largest keeps given parallel sizes and recomputation, and says what the tokens cost."""
    words = "--model 8b --gpus 8 --profile h100x8 --largest --tokens 1e9"
    code, out = plan(capsys, f"{words} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    assert code == 0 and "ranks: 8 = tensor 2 x pipeline 2 x data 2" in out and "1e+09 tokens: " in out
    code, full = plan(capsys, f"{words} --recompute full")
    assert code == 0 and "ranks: 8 = tensor 1 x pipeline 1 x data 8" in full
    assert "--recompute-granularity full" in full and "--recompute-granularity" not in out
    code, out = plan(capsys, f"{words} --pipeline-model-parallel-size 8 --seq-length 4000000")
    assert code == 2 and "drop the parallel sizes and --recompute, or narrow the model" in out


@pytest.mark.parametrize(
    ("words", "layout", "data"),
    [
        ("--model 70b --gpus 16 --profile h100x8", "ranks: 16 = tensor 4 x pipeline 1 x data 4", 4),
        ("--model 13b --gpus auto --profile h100x4 --offload-host-budget-gib 40", "tensor 1 x pipeline 1 x data 2", 2),
    ],
)
def test_a_given_batch_is_kept(capsys, words, layout, data):
    """By any layout that is chosen here; without one each data-parallel rank has one micro-batch."""
    code, out = plan(capsys, f"{words} --global-batch-size 64 --no-alternatives --tokens 1e9")
    assert code == 0 and layout in out and "global batch 64" in out and "--global-batch-size 64 " in out
    assert f"1e+09 tokens: {math.ceil(1e9 / (64 * 2048))} iterations" in out
    _, out = plan(capsys, f"{words} --no-alternatives")
    assert f"global batch {data}\n" in out and layout in out


def test_a_batch_that_no_layout_divides_over(capsys):
    """The fewest GPUs are those that the batch divides over as well."""
    words = "--model 20b --profile h200 --gpus auto --no-alternatives --offload-resident-fraction 0"
    assert "ranks: 2 = tensor 1 x pipeline 1 x data 2" in plan(capsys, words)[1]
    code, out = plan(capsys, f"{words} --global-batch-size 3")
    assert code == 0 and "ranks: 2 = tensor 1 x pipeline 2 x data 1" in out and "global batch 3\n" in out


def test_memory_without_room_for_slots(capsys):
    """All is updated on the CPU where a GPU has no room for slots, and plan and command say so, since training would
    choose otherwise; such a run is found by every search."""
    words = "--model 7b --profile h200 --no-alternatives"
    code, out = plan(capsys, f"{words} --seq-length 26624 --recompute none")
    assert code == 0 and "planned with --offload-gpu-share 0: it does not fit with the share that auto chooses" in out
    assert "0 streamed, 0 resident" in out and "71 on the CPU" in out
    assert out.rstrip().endswith("--interleaved-offload --offload-gpu-share 0.0")
    _, out = plan(capsys, f"{words} --seq-length 24576 --recompute none")
    assert "0 streamed" not in out and "--offload-gpu-share" not in out
    code, out = plan(capsys, f"{words} --seq-length 26624 --recompute none --offload-subgroup-numel 67108864")
    assert code == 0 and "planned with --offload-gpu-share 0" in out
    arguments = _build_parser().parse_args(["plan", *f"{words} --seq-length 26624 --recompute none".split()])
    config, profile = offload_config(arguments), BUILT_IN_PROFILES["h200"]
    lines, fits = dry_run_report(request_from(arguments, config, profile).run, config, profile)
    assert not fits and "update all on the CPU, without slots (--offload-gpu-share 0), or recompute" in lines[-1]
    code, out = plan(capsys, f"{words} --gpus auto --offload-device-budget-gib 0.1")
    assert code == 0 and "ranks: 1 = " in out and "0 streamed, 0 resident" in out
    code, out = plan(capsys, f"{words} --largest --offload-device-budget-gib 0.1")
    assert code == 0 and "0 streamed, 0 resident" in out


def test_gpus_that_do_not_fill_hosts(capsys):
    """Eleven GPUs of hosts with eight are eleven hosts, which is said."""
    _, out = plan(capsys, "--model 7b --gpus 11 --profile h100x8 --no-alternatives")
    assert "--gpus 11 does not fill hosts of 8 GPUs: planned on 11 hosts with 1 GPU(s) each" in out
    for gpus in (4, 8, 16):
        assert "does not fill" not in plan(capsys, f"--model 7b --gpus {gpus} --profile h100x8 --no-alternatives")[1]


def test_all_problems_stand_in_a_row():
    """The advice is cut off, a second problem is not."""
    assert _short(("a needs 2: do b", "c needs 3: do d")) == "does not fit: a needs 2; c needs 3"


def test_a_measured_machine_without_bf16(capsys, tmp_path):
    """The accelerator is named, not the host that was measured."""
    values = dict(name="node7", fingerprint="Xeon / 8 cores / 8 x 7 threads / Tesla V100-SXM2-32GB 32 GiB x 8")
    path = tmp_path / "node7.json"
    path.write_text(profile_to_json(replace(BUILT_IN_PROFILES["v100x8"], **values)))
    _, out = plan(capsys, f"--model 7b --gpus 8 --profile {path} --no-alternatives")
    assert "\nTesla V100-SXM2-32GB 32 GiB x 8 does not compute in bf16: planned with --fp16" in out
    assert main(f"plan --model 7b --bf16 --profile {path}".split()) == 2
    assert "but Tesla V100-SXM2-32GB 32 GiB x 8 does not compute in bf16" in capsys.readouterr().err


def test_a_machine_without_bf16(capsys):
    """A V100 is planned in fp16, which the first lines and the command say."""
    code, out = plan(capsys, "--model 7b --gpus 8 --profile v100x8 --no-alternatives")
    assert code == 0 and "v100x8 does not compute in bf16: planned with --fp16" in out
    assert "fp16 parameters, fp16 gradient buffer" in out and "full master" in out and "--bf16" not in out


def test_the_model_is_described(capsys):
    """What the plan takes the model to be stands in its first lines."""
    _, out = plan(capsys, f"{SIZES} --profile h200 --no-swiglu --normalization LayerNorm --no-alternatives")
    kind = "taken to be: no gated MLP of width 2048, LayerNorm, no biases, rope, untied embeddings of 1024 rows"
    assert kind in "\n".join(out.splitlines()[:4])


def test_unknown_limits(capsys, tmp_path):
    """A profile without a GPU's memory neither fits nor needs no offload, and answers no question about sizes."""
    path = tmp_path / "cpu.json"
    path.write_text(profile_to_json(replace(BUILT_IN_PROFILES["h200"], name="cpu", num_gpus=0, gpu_memory_bytes=0)))
    code, out = plan(capsys, f"--model 1b --profile {path}")
    assert code == 0 and "not checked: GPU memory" in out and "no offload needed" not in out
    assert "fits" not in out.splitlines()
    for flag in ("--gpus auto", "--largest"):
        assert main(f"plan --model 1b --profile {path} {flag}".split()) == 2
        assert f"{flag} needs the memory of a GPU" in capsys.readouterr().err
    _, out = plan(capsys, "--model 1b --gpus 4 --profile h100x4 --no-alternatives")
    assert "checkpoint time unknown: hardware profile h100x4 has no disk speed" in out


def test_hopeless_models_are_quick(capsys):
    """10000 wide layers are refused by the closed form, with no search and no table."""
    start = time.process_time()
    words = "--num-layers 10000 --hidden-size 65536 --num-attention-heads 64 --vocab-size 32000 --gpus 8"
    code, out = plan(capsys, f"{words} --profile h100x8")
    assert code == 2 and "weights and gradients of a rank alone need" in out and "strategies" not in out
    assert "does not fit on up to 1024 GPUs" in out
    assert time.process_time() - start < 2


def test_a_reader_may_stop_reading():
    """`plan ... | head -1` ends without a traceback, with the plan's own exit code."""
    program = f"{shlex.quote(sys.executable)} -m deep_offload plan --model 7b --profile h200"
    done = subprocess.run(
        ["bash", "-c", f"{program} | true; echo ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "0" and done.stderr == ""


def test_every_flag_is_explained(capsys):
    """--help says what each flag of plan and simulate means."""
    parser = _build_parser()
    for name in ("plan", "simulate"):
        command = parser._subparsers._group_actions[0].choices[name]
        assert [action.dest for action in command._actions if not action.help] == []


def test_shares_that_do_not_fit_have_no_times(capsys):
    """In the simulation's table of shares as in the plan's of strategies."""
    words = "--model 7b --profile h200 --seq-length 26624 --recompute none --offload-resident-fraction 0"
    assert main(["simulate", *words.split(), "--offload-gpu-share", "0"]) == 0
    table = capsys.readouterr().out.split("GPU share  slots")[1].splitlines()[1:8]
    rows = [row.split() for row in table]
    assert [row[0] for row in rows] == ["0", "0.25", "0.5", "0.625", "0.75", "0.875", "1"]
    assert rows[0][-1] == "cpu" and all(row[1:] == "- - - does not fit".split() for row in rows[1:])
