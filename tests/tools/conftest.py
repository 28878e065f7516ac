"""A small tokenizer, a small corpus, and a way to run the tools as a user does, with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 40  # seconds; the tools answer in one, machines under load are slower


def run_tool(name, *args, cwd=None, **kwargs):
    """Run tools/NAME.py and return the finished process; a hang fails the test."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": ""},
        **kwargs,
    )


@pytest.fixture(scope="session", name="run_tool")
def run_tool_fixture():
    return run_tool


@pytest.fixture(scope="session")
def texts():
    """About 300 kB of text in 600 documents, not all ASCII."""
    words = [f"{stem}{i}" for i in range(40) for stem in ("alpha", "Über", "本", "x = ", "\n")]
    return [" ".join(words[(7 * i + j * j) % len(words)] for j in range(20 + i % 150)) for i in range(600)]


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory, texts):
    """A folder with tokenizer.json, vocab.json and merges.txt of one byte-level BPE."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def write_jsonl(path, documents):
    """Write one JSON object a line; a text stands for {"text": text}."""
    entries = (document if isinstance(document, dict) else {"text": document} for document in documents)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", texts)


@pytest.fixture(scope="session")
def write_jsonl_file():
    return write_jsonl


@pytest.fixture
def preprocess(bpe_folder):
    """Run preprocess_data.py with the BPE tokenizer."""

    def run(*args, **kwargs):
        options = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", bpe_folder)
        return run_tool("preprocess_data", *options, *args, **kwargs)

    return run


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Return a function that writes an indexed dataset of given sequences and returns its prefix."""
    import numpy as np

    from megatron.training.datasets.indexed_writer import IndexedWriter

    def make(sequences, dtype=np.uint16):
        prefix = str(tmp_path_factory.mktemp("dataset") / "set")
        with IndexedWriter(prefix, np.dtype(dtype)) as writer:
            for tokens in sequences:
                writer.append_document(tokens, [len(tokens)])
            writer.finish()
            writer.publish()
        return prefix

    return make
