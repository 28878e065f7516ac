"""What the documentation shows works: blocks marked `bash run` are run, links and make targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```bash run\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)")
# Programs and folders that the blocks name; they see these instead of the repository, where nothing may be written.
SHARED = ("pretrain_gpt.py", "tools", "examples", "deep_offload", "megatron", "docs", "pyproject.toml")


def runnable_blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run_blocks(blocks: list[str], folder: Path) -> None:
    """Run shell blocks one after the other in `folder`; AssertionError with the output of the first that fails."""
    for name in SHARED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    binaries = folder / "bin"
    binaries.mkdir()
    python = binaries / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = dict(os.environ, PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    for block in blocks:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, f"{block}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


@pytest.mark.timeout(900)  # several blocks, of which each has a limit of its own
@pytest.mark.parametrize("page", [page for page in PAGES if runnable_blocks(page)])
def test_blocks_run(page, tmp_path):
    """The runnable shell blocks of a page succeed, in order, in a folder of their own."""
    run_blocks(runnable_blocks(page), tmp_path)


def test_a_failing_block_is_seen(tmp_path):
    """A block fails the test when one of its commands does, also inside a pipe."""
    with pytest.raises(AssertionError, match="python -c"):
        run_blocks(["python -c 'raise SystemExit(3)' | cat\n"], tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Every relative link of a page leads to a file of the repository."""
    broken = [
        link
        for link in LINK.findall((ROOT / page).read_text(encoding="utf-8"))
        if not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert broken == []


def test_where_things_are():
    """Every file that the table of CONTRIBUTING.md names exists."""
    table = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| ")]
    named = {name for line in table for name in re.findall(r"`([\w./*]+/[\w./*]*|\w+\.py|Makefile)`", line)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not list(ROOT.glob(name.rstrip("/")))] == []


def test_make_targets_exist():
    """Every `make TARGET` that a page names is a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    named = {target for text in pages for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"demo", "test", "setup"} <= named
    assert named - targets == set()


def test_flags_exist():
    """Every --flag in the tables and blocks of the quick start is known to the program that the page is about."""
    text = (ROOT / "docs" / "quick_start.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - {"--nproc_per_node"}
    known = set()
    for program in ("pretrain_gpt.py", "tools/preprocess_data.py", "tools/plot_loss.py"):
        result = subprocess.run(
            [sys.executable, str(ROOT / program), "--help"], capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        assert result.returncode == 0, result.stderr[-2000:]
        known |= set(re.findall(r"--[a-z][a-z0-9-]+", result.stdout))
    assert shown - known == {"--nproc"} & shown
