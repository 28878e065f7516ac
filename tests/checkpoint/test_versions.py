"""Checkpoints of other versions of this program: old ones load bit by bit, newer ones are refused with their number."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_foreign import check_format
from megatron.training.checkpointing_inspect_cli import main as inspect
from megatron.training.checkpointing_load import read_common
from megatron.training.checkpointing_save import OUR_FORMAT, OUR_KEY
from tests.checkpoint.cases import OFFLOAD, load, words
from tests.checkpoint.stored import FOLDERS, SMALL
from tests.rank_pool import RankFailure

LAYOUTS = {
    "as it was saved": (2, f"{OFFLOAD} --tensor-model-parallel-size 2"),
    "one rank, resident": (1, ""),
    "two stages, other subgroups": (2, f"{OFFLOAD} --pipeline-model-parallel-size 2 --offload-subgroup-numel 700"),
}


def test_every_format_has_a_stored_checkpoint():
    """Whoever raises the number stores one (`tests/checkpoint/stored.py`)."""
    assert [folder.name for folder in FOLDERS] == [f"format{number}" for number in range(1, OUR_FORMAT + 1)]
    assert sum(f.stat().st_size for folder in FOLDERS for f in folder.rglob("*") if f.is_file()) < 400_000 * len(
        FOLDERS
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_checkpoint_loads_bit_by_bit(pool, folder, name):
    """Digest, progress, steps, loss scale and, in the same layout, random numbers are those of the run that saved."""
    expected = json.loads((folder / "expected.json").read_text())
    ranks, flags = LAYOUTS[name]
    result = pool.run(load, words(SMALL, flags, f"--load {folder}"), ranks=ranks)[0]
    assert {key: result[key] for key in ("digest", "iteration", "samples", "step")} == {
        key: expected[key] for key in ("digest", "iteration", "samples", "step")
    }
    starts_anew = any("random numbers start anew" in line for line in result["lines"])
    assert starts_anew == (name != "as it was saved")
    assert not any("no checksums" in line for line in result["lines"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_checkpoint_is_read_by_the_tool(folder, capsys):
    """`inspect.py verify --digest` finds every file whole."""
    assert inspect(["verify", str(folder)]) == 0
    assert "match their checksums" in capsys.readouterr().out


@pytest.fixture
def copied(tmp_path):
    """The newest stored checkpoint, to be changed."""
    shutil.copytree(FOLDERS[-1], tmp_path, dirs_exist_ok=True)
    return tmp_path / "iter_0000003"


def _reseal(folder: Path, name: str) -> None:
    """Write the checksum of a changed file, as the version that wrote it would have."""
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    lines = [line.split("  ") for line in (folder / layout.CHECKSUMS).read_text().splitlines()]
    changed = [f"{digest if file == name else old}  {file}\n" for old, file in lines]
    (folder / layout.CHECKSUMS).write_text("".join(changed))


def _claim(folder: Path, number: object) -> None:
    path = folder / layout.COMMON
    common = torch.load(path, weights_only=False)
    common[OUR_KEY]["format"] = number
    torch.save(common, path)
    _reseal(folder, layout.COMMON)


def test_a_newer_format_ends_the_run_with_its_number(pool, copied):
    """A file that says it is newer is not guessed at, though its checksums are right."""
    _claim(copied, OUR_FORMAT + 1)
    sentence = f"ValueError: .*has format {OUR_FORMAT + 1} of a newer deep-offload, this one reads up to {OUR_FORMAT}"
    with pytest.raises(RankFailure, match=sentence):
        pool.run(load, words(SMALL, f"--load {copied.parent}"), ranks=1)


@pytest.mark.parametrize("number", [OUR_FORMAT + 1, 0, -1, "1.5", 10**9])
def test_an_unknown_format_is_refused_with_its_number(copied, number):
    """Numbers that no version has written, too."""
    _claim(copied, number)
    with pytest.raises(ValueError, match=rf"has format {number} of a newer deep-offload"):
        read_common(copied)
    _claim(copied, OUR_FORMAT)
    assert read_common(copied)["iteration"] == 3


@pytest.mark.parametrize("backend", ["sharded", "common"])
def test_an_unknown_version_of_torch_dist_is_refused_with_its_number(copied, backend):
    """megatron-core counts its own format in metadata.json."""
    path = copied / layout.CONFIG
    values = json.loads(path.read_text())
    assert check_format(copied) == "torch_dist" and values[f"{backend}_backend_version"] == 1
    path.write_text(json.dumps({**values, f"{backend}_backend_version": 7}))
    with pytest.raises(ValueError, match=rf"has version 7 of megatron-core's {backend} format .*, version 1 is read"):
        check_format(copied)
