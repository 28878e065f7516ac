"""A SLURM of our own on this host: munged, slurmctld and two slurmd as two nodes, all in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n0", "n1")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=10
GresTypes=gpu
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=200
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Return why no cluster can run here, None if one can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if missing:
        return f"{', '.join(missing)} is not installed (tests/slurm/install.sh installs SLURM on Debian)"
    if os.geteuid() != 0:
        return "slurmd starts jobs of other users and needs root"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


class Cluster:
    """Starts on construction; `close` ends everything that it started."""

    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError with the daemons' last words when the controller or a node does not come up."""
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        conf = folder / "slurm.conf"
        ports = _free_ports(3)
        host = socket.gethostname().split(".")[0]
        conf.write_text(_CONF.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count()))
        # GPUs that are counted and nothing else: SLURM wants to see a file for each.
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        for number in range(2):
            (folder / f"gpu{number}").touch()
        (folder / "state").mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MUNGE"))}
        self.env |= {"SLURM_CONF": str(conf), "PATH": _path()}
        self._start_munge()
        self._daemon("slurmctld", "-D", "-f", str(conf))
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node, "-f", str(conf))
        try:
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"key-file": key, "socket": self.folder / "munge.socket", "pid-file": self.folder / "munge.pid"}
        names |= {"log-file": self.folder / "munge.log", "seed-file": self.folder / "munge.seed"}
        words = [f"--{name}={path}" for name, path in names.items()]
        self._daemon("munged", "--foreground", "--force", *words)

    def _daemon(self, *words: str) -> None:
        name = f"{words[0]}-{len(self._daemons)}.out"
        with open(self.folder / name, "wb") as output:
            self._daemons.append(
                subprocess.Popen(words, env=self.env, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder)
            )

    def _wait_until_idle(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        states = ""
        while time.monotonic() < deadline and all(daemon.poll() is None for daemon in self._daemons):
            result = self.run("sinfo", "-h", "-N", "-o", "%N %t", "-p", "low", check=False)
            states = result.stdout
            if all(f"{node} idle\n" in states for node in NODES):
                return
            time.sleep(0.5)
        words = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.out")))
        raise RuntimeError(f"the cluster did not come up: {states}\n{words}")

    def run(self, *words: str, check: bool = True, env: dict[str, str] | None = None, cwd: Path | None = None):  # noqa: ANN201
        """Run a command of SLURM; returns the finished process."""
        result = subprocess.run(
            words, env={**self.env, **(env or {})}, cwd=cwd or self.folder, capture_output=True, text=True, timeout=300
        )
        assert not check or result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
        return result

    def submit(self, *words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> int:
        """Submit a job with sbatch; returns its number."""
        return int(self.run("sbatch", "--parsable", *words, env=env, cwd=cwd).stdout.split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.run("scontrol", "-o", "show", "job", str(number)).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, number: int, states: tuple[str, ...], seconds: float) -> dict[str, str]:
        """Wait until a job is in one of `states`; AssertionError with its state when that takes longer."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if job["JobState"] in states:
                return job
            assert time.monotonic() < deadline, f"job {number} is {job['JobState']} ({job.get('Reason')}), not {states}"
            time.sleep(0.5)

    def close(self) -> None:
        """Cancel all jobs and end the daemons."""
        self.run("scancel", "--state=RUNNING", "--full", *self._all_jobs(), check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _all_jobs(self) -> list[str]:
        return self.run("squeue", "-h", "-o", "%A", check=False).stdout.split()
