"""The example scripts start what the planner planned: every model on every machine, or say why it cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deep_offload.config import OffloadConfig
from deep_offload.model.hardware import profile_to_json
from deep_offload.model.memory import format_bytes
from megatron.training.arguments import build_config
from megatron.training.dry_run import run_shape
from megatron.training.explain import main as explain

ROOT = Path(__file__).parents[2]
SHRINK = dict(
    NUM_LAYERS="2",
    HIDDEN_SIZE="64",
    FFN_HIDDEN_SIZE="128",
    NUM_HEADS="4",
    NUM_GROUPS="2",
    SEQ_LENGTH="32",
    VOCAB_SIZE="128",
)


def load_planner():
    """Import the planner script, which is no package."""
    spec = importlib.util.spec_from_file_location("plan_cells", ROOT / "examples" / "plan_cells.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plan = load_planner()
CELLS = [(e, count, gb) for e in plan.EXAMPLES for gb in plan.GPUS for count in plan.GPU_COUNTS]


@pytest.fixture(scope="module")
def planned():
    """Every cell by script, GPUs and GB: planned once."""
    return {(e.script, count, gb): plan.plan_cell(e, count, gb) for e, count, gb in CELLS}


def start(script, tmp_path, **variables):
    """Run a script with a launcher that prints its arguments; returns the finished process."""
    show = tmp_path / "show.py"
    show.write_text("import json, os, sys\nprint(json.dumps(sys.argv[2:]))\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GPU", "BUDGET"))}
    environment = {**clean, "SAVE": str(tmp_path / "save"), "LAUNCHER": f"{sys.executable} {show}", **variables}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / script)], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("example", plan.EXAMPLES, ids=lambda example: example.script)
@pytest.mark.parametrize("gb", plan.GPUS)
def test_script_starts_the_plan(example, gb, planned, tmp_path):
    """The flags of a script give the run and the placement that its comments describe; impossible ones exit with 2."""
    for count in plan.GPU_COUNTS:
        cell = planned[example.script, count, gb]
        result = start(example.script, tmp_path, GPUS=str(count), GPU_GB=str(gb))
        if cell.result is None:
            assert (result.returncode, result.stdout) == (2, "")
            expected = f" on {count} GPU(s) of {gb} GB does not work: {cell.reason}\n"
            assert result.stderr.endswith(expected)
            continue
        assert result.returncode == 0, result.stderr
        config = build_config(json.loads(result.stdout), world_size=count)
        shape = run_shape(config.with_vocab(example.shape.padded_vocab_size))
        assert shape == cell.run
        assert config.offload.interleaved_offload == (cell.budget_gib is not None)
        if cell.budget_gib is not None:
            assert config.offload == OffloadConfig(
                interleaved_offload=True, offload_device_budget_gib=float(cell.budget_gib)
            )


def test_plans_are_current(planned, monkeypatch):
    """Scripts and docs/memory_sizing.md hold what the planner says now; `--write` brings them up to date."""
    monkeypatch.setattr(plan, "plan_cell", lambda e, count, gb: planned[e.script, count, gb])
    stale = [str(path) for path, text in plan.files().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python examples/plan_cells.py --write"


def test_stale_plan_is_seen(planned, monkeypatch):
    """A cell that changes makes its script and the table stale."""
    changed = dict(planned)
    key = ("llama2_7b.sh", 1, 40)
    changed[key] = replace(planned[key], budget_gib=5)
    monkeypatch.setattr(plan, "plan_cell", lambda e, count, gb: changed[e.script, count, gb])
    stale = {path.name for path, text in plan.files().items() if path.read_text(encoding="utf-8") != text}
    assert stale == {"llama2_7b.sh"}


def test_cells_that_fit_use_less_than_the_gpu(planned):
    """No plan takes more than 95 % of a GPU, and what is impossible with more GPUs is impossible with fewer."""
    for (script, count, gb), cell in planned.items():
        if cell.result is not None:
            assert cell.result.stages[0].gpu_bytes <= 0.95 * plan.GPUS[gb][0] * plan.GIB
        elif count > 1:
            assert planned[script, count // 2, gb].result is None
    assert sum(cell.result is None for cell in planned.values()) == 5
    assert {cell.budget_gib is None for cell in planned.values() if cell.result} == {True, False}


@pytest.mark.parametrize("machine", [dict(GPUS="3"), dict(GPU_GB="24")])
def test_other_machines_are_refused(machine, tmp_path):
    """Machines without a plan are named, with those that have one and how to give a plan."""
    result = start("llama2_7b.sh", tmp_path, **machine)
    assert result.returncode == 2
    assert "there is no plan for it; GPUS is 1, 2, 4 or 8 (of one node) and GPU_GB is 40, 80 or 141" in result.stderr


def test_own_plan(tmp_path):
    """A plan of one's own replaces the script's, on any machine."""
    own = dict(TENSOR="1", RECOMPUTE="none", GRADIENTS="fp32", BUDGET_GIB="3", GPUS="3")
    result = start("llama3_8b.sh", tmp_path, **own, GLOBAL_BATCH="6", SEQ_LENGTH="2048")
    config = build_config(json.loads(result.stdout), world_size=3)
    assert (config.offload.offload_device_budget_gib, config.precision.grad_buffer_dtype) == (3.0, "fp32")


@pytest.mark.parametrize("example", plan.EXAMPLES, ids=lambda example: example.script)
def test_explain_finds_no_surprise(example, capsys):
    """`python -m deep_offload explain` reads each script, with the part that it sources."""
    assert explain([str(ROOT / "examples" / example.script)], program="explain") == 0
    assert "no surprises" in capsys.readouterr().out


def test_dry_run_of_a_script(planned, tmp_path):
    """What the script prints about memory is what `--dry-run` computes on that machine."""
    cell = planned["llama2_7b.sh", 1, 40]
    profile = tmp_path / "machine.json"
    profile.write_text(profile_to_json(cell.result.profile))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    result = subprocess.run(
        ["bash", str(ROOT / "examples/llama2_7b.sh"), "--dry-run", "--offload-profile", str(profile)],
        env={**clean, "GPUS": "1", "GPU_GB": "40", "LAUNCHER": sys.executable, "SAVE": str(tmp_path / "save")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    stage = cell.result.stages[0]
    assert f"GPU bytes of a rank: {format_bytes(stage.gpu_bytes)} of" in result.stdout
    assert f"host bytes of a rank: {format_bytes(stage.host_bytes)} " in result.stdout


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=[] if "8b" in e.script else [pytest.mark.full], id=e.script) for e in plan.EXAMPLES],
)
def test_shrunk_script_trains(example, tmp_path):
    """With sizes shrunk by variables a script trains under torchrun and leaves a finished SAVE/status."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    plan_of_one = dict(TENSOR="1", RECOMPUTE="full", GRADIENTS="bf16", BUDGET_GIB="1", GPUS="1")
    variables = dict(SAVE=str(tmp_path / "save"), TRAIN_ITERS="2", GLOBAL_BATCH="2", PYTHON=sys.executable)
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / example.script), "--use-cpu", "--num-workers", "0", "--eval-iters", "1"],
        env={**clean, **SHRINK, **plan_of_one, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert " iteration        2/       2 |" in result.stdout
    assert json.loads((tmp_path / "save" / "status").read_text())["status"] == "finished"


@pytest.mark.full
def test_two_nodes_without_slurm(tmp_path):
    """The same command with NODE_RANK 0 and 1 trains one model on two nodes (here: on one host)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    own = dict(TENSOR="1", RECOMPUTE="none", GRADIENTS="bf16", BUDGET_GIB="1", GPUS="1", NUM_NODES="2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    run = dict(
        SAVE=str(tmp_path / "save"), TRAIN_ITERS="2", GLOBAL_BATCH="2", PYTHON=sys.executable, OMP_NUM_THREADS="1"
    )
    words = ["bash", str(ROOT / "examples/llama3_8b.sh"), "--use-cpu", "--num-workers", "0", "--eval-iters", "0"]
    nodes = []
    for rank in range(2):
        env = {**clean, **SHRINK, **own, **place, **run, "NODE_RANK": str(rank)}
        nodes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [node.communicate(timeout=280)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert " iteration        2/       2 |" in outputs[1]
    assert ", 2 ranks" in outputs[0]


@pytest.mark.parametrize(("status", "queued"), [("resumable", True), ("finished", False)])
def test_a_stopped_job_is_queued_again_wherever_it_was_submitted(tmp_path, status, queued):
    """Relative paths are those of the folder of `sbatch`: what training writes there is what the job reads."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "work").mkdir()
    control = tmp_path / "programs" / "scontrol"
    control.write_text('#!/bin/bash\n[ "$1" = requeue ] && echo "requeued $2"\n')
    (tmp_path / "programs" / "sleep").write_text("#!/bin/bash\n")
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import json, pathlib, sys\n"
        "words = sys.argv[1:]\n"
        "folder = pathlib.Path(words[words.index('--save') + 1])\n"
        "folder.mkdir(parents=True)\n"
        f"(folder / 'status').write_text(json.dumps({{'status': '{status}'}}))\n"
        "assert pathlib.Path(words[0]).is_file() and words[words.index('--data-path') + 1] == 'mine_text_document'\n"
    )
    for program in (control, tmp_path / "programs" / "sleep"):
        program.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GPU", "BUDGET", "SAVE"))}
    variables = dict(SLURM_JOB_ID="17", GPUS="8", DATA="mine_text_document", TOKENIZER="folder")
    script = f"source {ROOT}/examples/slurm/run.sh {ROOT}/examples/llama2_7b.sh"
    for save in (None, "here/run"):
        chosen = {} if save is None else {"SAVE": save}
        environment = {**clean, **variables, **chosen, "LAUNCHER": f"{sys.executable} {launcher}"}
        environment["PATH"] = f"{tmp_path / 'programs'}:{environment['PATH']}"
        words = ["bash", "-c", script]
        result = subprocess.run(
            words, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        assert ("requeued 17" in result.stdout) == queued
        assert (tmp_path / "work" / (save or "checkpoints/llama2_7b") / "status").exists()
