"""The user's pages say what the programs do: messages, flags, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from deep_offload.config import OffloadConfig
from megatron.training.flags import all_flags, flags_by_name
from megatron.training.flags_accepted import MAPPED, NO_EFFECT, ONLY

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]+")
# Flags of other programs that the pages name.
FOREIGN = set(
    """--gpus --ipc --shm-size --ulimit --cap-add --nv --mem --cpus-per-task --signal --nodes --gpus-per-node
    --ntasks-per-node --export --nproc_per_node --nnodes --no-build-isolation --model --profile --largest --write
    --subgroups --gpu-share --cpuset-cpus --membind --partitions --gpus-per-task
    --help""".split()
)


def messages():
    """Every text in the sources, with what varies replaced by one character."""
    files = [ROOT / "pretrain_gpt.py", *(ROOT / "megatron").rglob("*.py"), *(ROOT / "deep_offload").rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def is_a_message(shown, texts):
    """Whether some text has all fixed parts of `shown`, in order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in shown.split("...") if part.strip()), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_messages_exist():
    """Every message that the troubleshooting page quotes is one that the program prints."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = set(messages())
    shown = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(shown) >= 20
    missing = [message for message in shown if not is_a_message(message, texts)]
    assert missing == []
    assert not is_a_message("optimizer state needs ... of host memory, but nobody ...", texts), "the check can fail"


@pytest.mark.parametrize(
    "page", ["flags", "placement", "memory_sizing", "troubleshooting", "installation", "launching"]
)
def test_flags_exist(page):
    """Every flag that a page names is one of pretrain_gpt.py, or listed here as another program's."""
    shown = set(FLAG.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")))
    known = {*flags_by_name(), *MAPPED, *NO_EFFECT, *ONLY, *FOREIGN}
    assert shown - known == set()


def test_our_flags_are_all_explained():
    """The table of our own flags has each field of OffloadConfig."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    table = page[page.index("## Ours") : page.index("## The log line")]
    ours = {"--" + name.replace("_", "-") for name in OffloadConfig.__dataclass_fields__}
    assert ours - set(FLAG.findall(table)) == set()
    assert len(all_flags()) > len(ours)


def test_index_names_every_page():
    """docs/index.md links to every other page, and the README to the index's first ones."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\((\w+\.md)\)", index)) == set()
