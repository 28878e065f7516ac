"""The demo's text and tokenizer: enough, unique, the same every time, and lossless."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from examples.demo import corpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    return path, corpus.build_corpus(path)


def test_corpus_is_large_and_unique(text):
    """The standard library gives at least 2 MB in documents without repetition."""
    path, (num_documents, num_bytes) = text
    documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert num_bytes >= 2_000_000
    assert len(documents) == num_documents == len(set(documents)) > 500
    assert sum(len(document.encode()) for document in documents) == num_bytes


def test_corpus_is_reproducible(text, tmp_path):
    """A second run writes the same bytes."""
    corpus.build_corpus(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == text[0].read_bytes()


def make_library(folder, monkeypatch, source):
    (folder / "lib").mkdir()
    (folder / "lib" / "module.py").write_text(source)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder / "lib"))
    monkeypatch.setattr(corpus, "_reference_topics", lambda: iter(()))


def test_docstrings_and_comments_are_found_once(tmp_path, monkeypatch):
    """Docstrings come under their name, comments of two lines join them in order, repetitions and code do not."""
    doc = "This sentence is long enough to be kept in the corpus."
    comment = "# A comment that explains something over\n# two lines, which is prose as well.\n"
    source = f'"""{doc}"""\n{comment}def f():\n    """{doc}"""\n    return 1  # one line is code\n'
    make_library(tmp_path, monkeypatch, source)
    monkeypatch.setattr(corpus, "MIN_CORPUS_BYTES", 1)
    corpus.build_corpus(tmp_path / "out.jsonl")
    (document,) = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    joined = "A comment that explains something over\ntwo lines, which is prose as well."
    assert document == f"module: {doc}\n\n{joined}"


def test_stripped_python_is_named(tmp_path, monkeypatch):
    """A Python without sources is an error that names the folder and both sizes."""
    make_library(tmp_path, monkeypatch, "")
    with pytest.raises(ValueError, match=r"lib holds 0 bytes of text, the demo needs 2000000"):
        corpus.build_corpus(tmp_path / "out.jsonl")


def test_tokenizer_is_lossless_and_reproducible(text, tmp_path):
    """The trained tokenizer has the size asked for, gives every text back, and is the same at every training."""
    tokenizers = pytest.importorskip("tokenizers")
    from examples.demo.tokenizer import END_OF_TEXT, train_tokenizer

    path = tmp_path / "few.jsonl"
    lines = text[0].read_text(encoding="utf-8").splitlines(keepends=True)[:150]
    path.write_text("".join(lines), encoding="utf-8")
    assert train_tokenizer(path, 1024, tmp_path / "a") == 1024
    train_tokenizer(path, 1024, tmp_path / "b")
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    for sample in (json.loads(lines[7])["text"], "Zażółć\tgęślą 🙂 \x01\n  jaźń"):
        assert tokenizer.decode(tokenizer.encode(sample).ids, skip_special_tokens=False) == sample


def test_tokenizer_command(tmp_path):
    """The command trains on any JSON lines; a file that is none ends it with one sentence."""
    pytest.importorskip("tokenizers")
    (tmp_path / "good.jsonl").write_text('{"text": "one word and another word"}\n')
    (tmp_path / "bad.jsonl").write_text("plain text\n")
    for name, code, said in (
        ("good", 0, "trained a byte-level BPE tokenizer"),
        ("bad", 1, "bad.jsonl cannot be used"),
        ("no", 1, "No such file"),
    ):
        command = [sys.executable, "-m", "examples.demo.tokenizer", str(tmp_path / f"{name}.jsonl")]
        command += ["--vocab-size", "300", "--output", str(tmp_path / "tokenizer")]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == code, result.stderr
        assert said in result.stdout + result.stderr
        assert len(result.stderr.splitlines()) == code
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
