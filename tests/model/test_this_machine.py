"""Which cached profile a dry run goes by: that of this machine and its ranks and threads, told without torch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from deep_offload.model.hardware import profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES, cache_file
from deep_offload.model.this_machine import ThisMachine, find_this_machine, fingerprint_of, training_profile
from megatron.training.arguments import build_config
from megatron.training.dry_run import dry_run

H200 = BUILT_IN_PROFILES["h200"]
HERE = ThisMachine("Xeon / 8481C", 16, True, ("NVIDIA H200",))
GPU = "NVIDIA H200 139 GiB x 1"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path))
    return tmp_path


def keep(name: str, fingerprint: str, age: int, **values: object) -> None:
    """Put a profile into the cache as if it was written `age` seconds after another time."""
    path = cache_file(fingerprint)
    path.write_text(profile_to_json(replace(H200, name=name, fingerprint=fingerprint, **values)))
    os.utime(path, (1e9 + age, 1e9 + age))


def test_the_profile_that_training_would_use():
    """Other machines' newer profiles are left alone; the rank and thread count decides, and a miss is told."""
    profile, note = training_profile(None, HERE, 1, None)
    assert profile is H200 and "this machine (Xeon / 8481C / 16 cores / NVIDIA H200) was not measured yet" in note
    keep("two ranks", fingerprint_of(HERE.cpu, 16, 2, 7, GPU), 1)
    profile, note = training_profile(None, HERE, 1, None)
    assert profile.name == "two ranks" and "but with 2 x 7 threads, where training would use 1 x 15 threads" in note
    keep("mine", fingerprint_of(HERE.cpu, 16, 1, 15, GPU), 0)
    for number, other in enumerate(
        (
            fingerprint_of("Epyc", 16, 1, 15, GPU),
            fingerprint_of(HERE.cpu, 32, 1, 15, GPU),
            fingerprint_of(HERE.cpu, 16, 1, 15, "no GPU"),
            fingerprint_of(HERE.cpu, 16, 1, 15, "NVIDIA H100 79 GiB x 1"),
            fingerprint_of(HERE.cpu, 16, 1, 15, "NVIDIA H200 NVL 139 GiB x 1"),
            fingerprint_of(HERE.cpu, 16, 1, 15, "NVIDIA H200 139 GiB x 2"),
        )
    ):
        keep("other", other, 10 + number)
    profile, note = training_profile(None, HERE, 1, None)
    assert profile.name == "mine" and "on this machine with 1 x 15 threads, as training takes here" in note
    assert training_profile(None, HERE, 2, None)[0].name == "two ranks"
    assert training_profile(None, HERE, 2, 15)[1].startswith("hardware profile measured before on this machine, but")
    assert training_profile("gh200", HERE, 1, None)[0] is BUILT_IN_PROFILES["gh200"]


def test_what_the_driver_says(tmp_path, monkeypatch):
    """GPUs are found by their device files, with the driver's names for them, and left out with --use-cpu."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    assert not find_this_machine(use_cpu=False, root=tmp_path).has_gpu
    (tmp_path / "dev" / "nvidia0").touch()
    assert find_this_machine(use_cpu=False, root=tmp_path).gpu_names == ()
    folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / "0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   0\n")
    found = find_this_machine(use_cpu=False, root=tmp_path)
    assert found.has_gpu and found.gpu_names == ("NVIDIA H200",)
    assert not find_this_machine(use_cpu=True, root=tmp_path).has_gpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert find_this_machine(use_cpu=False, root=tmp_path).gpu_names == (), "which of them it hides is not told here"


def test_it_is_the_fingerprint_of_the_measurement():
    """A profile measured here, for the device that training would take, is this machine's."""
    measure = pytest.importorskip("deep_offload.runtime.measure")
    torch = pytest.importorskip("torch")
    here = find_this_machine(use_cpu=True)
    assert here.is_measured_by(replace(H200, fingerprint=measure.fingerprint(torch.device("cpu"), 3, 2)))
    assert not here.is_measured_by(H200)


def test_the_dry_run_goes_by_it(monkeypatch):
    """`--dry-run` takes this machine's profile, not the newest; without limits it does not say that the run fits.
    Two ranks of one host without GPUs share it."""
    here = find_this_machine(use_cpu=True)
    keep("mine", fingerprint_of(here.cpu, here.cores, 1, 2, "no GPU"), 0, num_gpus=0, gpu_memory_bytes=0)
    keep("newest", fingerprint_of("Epyc of another kind", 64, 1, 63, GPU), 5)
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 1 "
        "--lr 1e-3 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --use-cpu --interleaved-offload "
        "--offload-cpu-threads 2 --dry-run"
    )
    report = dry_run(build_config(words.split()))
    assert any(line.endswith("data 1, 1 per host") for line in report.lines)
    with monkeypatch.context() as patch:
        for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "29500")
        both = dry_run(build_config(words.split(), world_size=2))
    assert any(line.endswith("data 2, 2 per host") for line in both.lines)
    assert any(" of 62.50 GiB, and" in line for line in both.lines), "each has half of the host's 125 GiB"
    assert "with 1 x 2 threads, as training takes here" in report.lines[0]
    assert any(line.startswith("hardware: mine, ") for line in report.lines)
    assert report.fits and "fits" not in report.lines and "not checked: GPU memory" in report.lines[-1]
