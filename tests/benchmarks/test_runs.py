"""What benchmark parts do with time that runs out, with failures and with machines that change."""

import json
import sys
import time
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks import iteration, runs, sweeps
from benchmarks.peer_model import build_plain
from benchmarks.runs import Run, Session
from benchmarks.shapes import SHAPES
from megatron.training.arguments import build_config
from megatron.training.dry_run import dry_run


@dataclass(frozen=True, slots=True)
class Echo(Run):
    """A peer that takes no time: prints `words` as its result and ends with code 0, or 3 where they say fail."""

    def command(self, folder, use_cpu):
        code = f"import sys; print('RESULT ' + {self.words!r}); sys.exit(3 * ('fail' in {self.words!r}))"
        return [sys.executable, "-c", code]


def echo(name, milliseconds, failing=False):
    words = {"iteration_ms": milliseconds, "losses": [1.0], "host_gib": 1.0}
    if failing:
        words["fail"] = True
    return Echo(name, json.dumps(words), ours=False, expected_s=5)


def session(path, seconds=60.0, only=()):
    return Session(path, time.monotonic() + seconds, only)


def test_part_goes_on_where_it_stopped(tmp_path):
    """A run that is done is not repeated, one that failed is, and the newest line counts."""
    first = runs.run_part("p", [echo("a", 1.0), echo("b", 2.0, failing=True)], session(tmp_path))
    assert ["failed" in record for record in first] == [False, True]
    again = runs.run_part("p", [echo("a", 9.0), echo("b", 3.0)], session(tmp_path))
    assert [record["iteration_ms"] for record in again] == [1.0, 3.0]
    assert len((tmp_path / runs.RESULTS_FILE).read_text().splitlines()) == 3


def test_nothing_starts_that_would_end_after_the_limit(tmp_path, capsys):
    """A part stops before a run that does not fit into the time left."""
    assert runs.run_part("p", [echo("a", 1.0)], session(tmp_path, seconds=4.0)) == []
    assert "stops before a" in capsys.readouterr().out


def test_only_named_runs_are_done(tmp_path):
    """--only leaves the positions of the others open."""
    records = runs.run_part("p", [echo("a", 1.0), echo("b", 2.0)], session(tmp_path, only=("b",)))
    assert [(record["name"], record["position"]) for record in records] == [("b", 1)]


def records_of(*rows):
    return [
        {"name": name, "iteration_ms": time_ms, "machine": machine, "position": i}
        for i, (name, time_ms, machine) in enumerate(rows)
    ]


def test_ratio_takes_both_neighbors_of_one_machine():
    """Runs before and after count, those of another machine do not."""
    rows = records_of(("us", 100.0, "m"), ("them", 300.0, "m"), ("us", 200.0, "m"), ("us", 1.0, "n"))
    assert iteration.neighbor_ratios(rows, "them", "us") == [2.0]
    lonely = records_of(("us", 100.0, "m"), ("them", 300.0, "n"))
    assert iteration.neighbor_ratios(lonely, "them", "us") == []


def test_target_is_judged_by_the_middle_ratio():
    """A target says whether it was reached."""
    target = iteration.Target("full", "them", "us", least=2.5)
    assert "reached" in target.verdict(2.5)
    assert "MISSED" in target.verdict(2.4)
    assert "MISSED" in replace(target, least=None, most=1.1).verdict(1.2)


def test_cost_of_checks_is_told_apart():
    """Checked steps and those behind them, which wait less, beside the others, whatever the first ones took."""
    times = [9000.0, 700.0, 700.0, 700.0] + [{0: 950.0, 1: 300.0}.get(step % 4, 500.0) for step in range(5, 28)]
    record = {"name": iteration.VERIFIED.name, "iterations_ms": times}
    assert iteration._verify_lines([record]) == [
        "ours_r0_verified: a check takes 250 ms (1250.0 (1250.0-1250.0) ms with the step behind it, 500 ms a step "
        "without): 0.5 % with --offload-verify-interval 100"
    ]


def all_runs():
    parts = {**iteration.PARTS, **sweeps.PARTS, "smoke": iteration.SMOKE, "sweep": sweeps.SMOKE}
    return [run for part in parts.values() for run in part if run.ours]


@pytest.mark.parametrize("run", all_runs(), ids=lambda run: f"{run.shape}-{run.name}")
def test_command_lines_are_understood(run, tmp_path):
    """Every run of ours has settings that pretrain_gpt.py accepts."""
    command = run.command(tmp_path, use_cpu=False)
    build_config(command[2:])


def test_targets_name_runs_of_their_part():
    """No target is about a run that its part does not have."""
    parts = {**iteration.PARTS, "smoke": iteration.SMOKE}
    for target in iteration.TARGETS:
        assert {target.slow, target.fast} <= {run.name for run in parts[target.part]}


def test_main_model_is_the_peers_model(tmp_path):
    """Both count 3.48 B parameters: same width, depth, biases and no positions."""
    command = iteration.R0.command(tmp_path, use_cpu=False)
    lines = dry_run(build_config(command[2:])).lines
    assert "model: 3.48 B parameters, 16 layers, sequence 2048, micro-batch 1, global batch 1" in lines
    planned = {"predicted_gpu_gib", "predicted_host_gib", "predicted_iteration_ms"}
    assert runs.read_plan("\n".join(lines)).keys() == planned
    peer = build_plain(SHAPES["3.5b"], torch.device("meta"), torch.bfloat16)
    assert sum(parameter.numel() for parameter in peer.parameters()) == 3_484_229_632
