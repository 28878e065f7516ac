"""The sbatch scripts on a real SLURM: both start styles, two nodes, preemption, requeue, the same bits after all.

Needs Debian's SLURM (tests/slurm/install.sh) and root; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "llama3_8b.sh")
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no SLURM here: {WHY_NOT}"),
    pytest.mark.timeout(3000),
]
NUM_STEPS = 40
PATIENCE = 1500  # seconds for anything that imports torch: the machine may be busy
FLAGS = [
    *"--use-cpu --num-workers 0 --eval-iters 0 --log-state-digest --deterministic-mode --lr-decay-iters 500".split(),
    *"--offload-resident-fraction 0 --offload-gpu-share 0.5".split(),
]
SIZES = dict(
    NUM_LAYERS="2",
    HIDDEN_SIZE="64",
    FFN_HIDDEN_SIZE="128",
    NUM_HEADS="4",
    NUM_GROUPS="2",
    SEQ_LENGTH="32",
    VOCAB_SIZE="128",
    GLOBAL_BATCH="4",
    SAVE_INTERVAL="1000",
    TRAIN_ITERS=str(NUM_STEPS),
    TENSOR="1",
    RECOMPUTE="none",
    GRADIENTS="bf16",
    BUDGET_GIB="1",
    PYTHON=sys.executable,
    OMP_NUM_THREADS="1",
    MASTER_ADDR="127.0.0.1",  # the nodes' names are those of one host
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A SLURM of two nodes with two GPUs each, all on this host."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def submit(cluster, folder, script, *options):
    """Submit a model script; returns the job's number and the variables of its run."""
    env = {**SIZES, "SAVE": str(folder / "save"), "PROGRAM": str(Path(__file__).with_name("slow_train.py"))}
    common = ["--cpus-per-task=1", "--time=20", "--signal=USR1@30", f"--output={folder}/job.log"]
    path = str(ROOT / "examples" / "slurm" / script)
    return cluster.submit(*common, *options, path, SCRIPT, *FLAGS, env=env, cwd=folder)


def log(folder):
    """What the job has printed so far."""
    path = folder / "job.log"
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(condition, seconds, what):
    """Wait until `condition()` holds; AssertionError with `what()` when that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def steps(text):
    """Iterations whose log lines stand in `text`, in order."""
    return [int(number) for number in re.findall(r"\] iteration +(\d+)/", text)]


def digest(text):
    """The last state digest in `text`; a run that was stopped prints one, too."""
    found = re.findall(r"state digest: (sha256:[0-9a-f]{64})", text)
    assert found, text[-3000:]
    return found[-1]


@pytest.fixture(scope="module")
def expected(cluster, tmp_path_factory):
    """The digest of the run on two ranks, without SLURM and without a stop."""
    env = {**cluster.env, **SIZES, "SAVE": str(tmp_path_factory.mktemp("plain") / "save"), "GPUS": "2"}
    result = subprocess.run(["bash", SCRIPT, *FLAGS], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert steps(result.stdout) == list(range(1, NUM_STEPS + 1))
    return digest(result.stdout)


def check_resumed(cluster, job, folder, expected):
    """The job ends well after one restart, did every step once, and has the bits of a run without a stop."""
    done = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), PATIENCE)
    text = log(folder)
    assert (done["JobState"], done["Restarts"]) == ("COMPLETED", "1"), text[-3000:]
    assert "SIGUSR1 was received" in text
    assert f"stopped before its end: job {job} is queued again" in text
    assert steps(text) == list(range(1, NUM_STEPS + 1))
    assert json.loads((folder / "save" / "status").read_text())["status"] == "finished"
    assert digest(text) == expected


@pytest.mark.full
def test_preempted_job_resumes(cluster, expected, tmp_path):
    """torchrun, one task a node: a job of higher priority takes the node; ours saves, waits, goes on, same bits."""
    job = submit(cluster, tmp_path, "torchrun.sbatch", "--partition=low", "--gpus-per-node=2", "--cpus-per-task=2")
    wait_for(lambda: len(steps(log(tmp_path))) > 3, PATIENCE, lambda: log(tmp_path)[-3000:])
    node = cluster.job(job)["NodeList"]
    other = cluster.submit(
        "--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    assert cluster.wait(other, ("COMPLETED",), PATIENCE)["JobState"] == "COMPLETED"
    check_resumed(cluster, job, tmp_path, expected)


@pytest.mark.full
def test_signal_before_the_time_is_over(cluster, expected, tmp_path):
    """srun, one task a GPU: the signal that SLURM sends before the time limit saves, requeues, goes on, same bits."""
    job = submit(cluster, tmp_path, "srun.sbatch", "--gpus-per-node=2", "--ntasks-per-node=2")
    wait_for(lambda: len(steps(log(tmp_path))) > 3, PATIENCE, lambda: log(tmp_path)[-3000:])
    cluster.run("scancel", "--signal=USR1", str(job))  # what `#SBATCH --signal` does, without waiting for it
    check_resumed(cluster, job, tmp_path, expected)


@pytest.mark.full
@pytest.mark.parametrize("script", ["torchrun.sbatch", "srun.sbatch"])
def test_two_nodes(cluster, expected, tmp_path, script):
    """Two nodes of one GPU each, in both styles, train what two GPUs of one node train."""
    job = submit(cluster, tmp_path, script, "--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1")
    done = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), PATIENCE)
    text = log(tmp_path)
    assert done["JobState"] == "COMPLETED", text[-3000:]
    assert digest(text) == expected
    assert "world_size ...................................... 2" in text


@pytest.mark.parametrize(
    "options, variables, sentence",
    [
        (
            ["--ntasks=2"],
            {"RANK": "0", "WORLD_SIZE": "1"},
            "SLURM_NTASKS is 2, but this process belongs to a job of 1 (WORLD_SIZE): start with srun, or with torchrun "
            "and one task per node, or unset SLURM_NTASKS",
        ),
        (
            ["--ntasks=2"],
            {"WORLD_SIZE": "2"},
            "RANK is not set though other variables of a distributed job are: start with torchrun",
        ),
    ],
)
def test_contradictions_are_refused(cluster, options, variables, sentence):
    """Tasks whose torch variables contradict SLURM's end with code 2 and one sentence, before torch is imported."""
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--mock-data"]
    result = cluster.run("srun", *options, *words, check=False, env=variables)
    assert result.returncode == 2
    assert f"pretrain_gpt.py: error: {sentence}\n" in result.stderr


def test_batch_script_without_srun_is_refused(cluster, tmp_path):
    """A batch script of two tasks that starts python itself would train one rank alone: it is refused."""
    line = f"{sys.executable} {ROOT}/pretrain_gpt.py --mock-data"
    job = cluster.submit("--ntasks=2", f"--output={tmp_path}/job.log", f"--wrap={line}")
    done = cluster.wait(job, ("COMPLETED", "FAILED"), 60)
    assert (done["JobState"], done["ExitCode"]) == ("FAILED", "2:0")
    assert "SLURM_NTASKS is 2, but this process belongs to a job of 1 (no srun and no torchrun)" in log(tmp_path)


@pytest.mark.full
def test_failed_job_is_not_queued_again(cluster, tmp_path):
    """A run that cannot start ends its job with a failure, once."""
    job = submit(cluster, tmp_path, "torchrun.sbatch", "--gpus-per-node=2", "--export=ALL,TRAIN_ITERS=0x")
    done = cluster.wait(job, ("COMPLETED", "FAILED"), PATIENCE)
    assert (done["JobState"], done["Restarts"]) == ("FAILED", "0"), log(tmp_path)[-2000:]
    assert "queued again" not in log(tmp_path)
