"""docs/data.md: its commands run as written, in order, and its example output has the words they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "data.md"


def without_numbers(text):
    """Figures depend on the release of the tokenizer's library; words do not."""
    return re.sub(r"[0-9.]+", "#", text)


def test_commands_run(tmp_path, corpus, bpe_folder):
    """Every bash block of the page works in a folder with a corpus and a tokenizer of the names it uses."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "corpus").mkdir()
    shutil.copy(corpus, tmp_path / "corpus" / "a.jsonl")
    shutil.copytree(bpe_folder, tmp_path / "tokenizer")
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-euc", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr
    example = re.search(r"^```\n(mytext_text_document: .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert example is not None and without_numbers(example.group(1)) in without_numbers(result.stdout)
    assert (tmp_path / "joined" / "all.idx").read_bytes() == (tmp_path / "mytext_text_document.idx").read_bytes()


def test_options_exist():
    """Every option that the page names exists in one of the tools."""
    help_texts = [
        subprocess.run(
            [sys.executable, str(ROOT / "tools" / tool), *words, "--help"], capture_output=True, text=True, timeout=40
        ).stdout
        for tool, words in (("preprocess_data.py", ()), ("data.py", ("check",)), ("merge_datasets.py", ()))
    ]
    named = set(re.findall(r"`(--[a-z-]+)", PAGE.read_text(encoding="utf-8")))
    refused = {"--split-sentences", "--find-optimal-num-workers"}
    assert {option for option in named - refused if not any(option in text for text in help_texts)} == set()
