"""tools/preprocess_data.py: which bytes it writes, from which inputs, with which tokenizers."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.training.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def pair(prefix):
    return tuple(Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx"))


def core_pair(prefix, documents, dtype):
    """The bytes that megatron.core's own builder writes for documents of (ids, lengths)."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids, lengths in documents:
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")
    return pair(prefix)


def test_same_bytes_as_core(tmp_path, texts, corpus, bpe_folder, preprocess):
    """The .bin and .idx equal, byte for byte, what megatron.core's builder writes; core's reader opens them."""
    result = preprocess("--input", corpus, "--output-prefix", tmp_path / "a", "--append-eod", "--workers", 2)
    assert result.returncode == 0, result.stderr
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(bpe_folder))
    documents = [tokenizer.tokenize(text) + [tokenizer.eod] for text in texts]
    expected = core_pair(tmp_path / "core", [(ids, [len(ids)]) for ids in documents], np.uint16)
    assert pair(tmp_path / "a_text_document") == expected
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(tmp_path / "a_text_document"))
    assert len(dataset) == len(texts)
    assert [dataset[i].tolist() for i in (0, 311, 599)] == [documents[i] for i in (0, 311, 599)]


def test_large_vocabulary_and_sentences_as_core(tmp_path, write_jsonl_file, run_tool):
    """int32 from 65500 ids on; lists are sentences of one document; texts without a token leave an empty document."""
    entries = [{"text": "1 2 69999"}, {"text": ["3 4", "", "5"]}, {"text": ""}, {"text": []}, {"text": "6"}]
    source = write_jsonl_file(tmp_path / "in.jsonl", entries)
    options = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 70000, "--append-eod")
    result = run_tool("preprocess_data", "--input", source, "--output-prefix", tmp_path / "a", *options)
    assert result.returncode == 0, result.stderr
    assert "2 of the documents gave no token" in result.stdout
    eod = 70000
    documents = [([1, 2, 69999, eod], [4]), ([3, 4, 5, eod], [2, 2]), ([], []), ([], []), ([6, eod], [2])]
    assert pair(tmp_path / "a_text_document") == core_pair(tmp_path / "core", documents, np.int32)


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(65498, 2), (65499, 4)])
def test_type_of_tokens(tmp_path, write_jsonl_file, run_tool, vocab_size, itemsize):
    """65499 ids (with the end-of-document id) are stored in 2 bytes, 65500 in 4: Megatron's border."""
    source = write_jsonl_file(tmp_path / "in.jsonl", ["1 2 3"])
    options = ("--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size, "--workers", 1)
    result = run_tool("preprocess_data", "--input", source, "--output-prefix", tmp_path / "a", *options)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a_text_document.bin").stat().st_size == 3 * itemsize


def test_workers_do_not_change_bytes(tmp_path, corpus, preprocess):
    """1, 3 and 7 workers write the same bytes: documents keep the order of the input."""
    pairs = []
    for workers in (1, 3, 7):
        result = preprocess("--input", corpus, "--output-prefix", tmp_path / str(workers), "--workers", workers)
        assert result.returncode == 0, result.stderr
        pairs.append(pair(tmp_path / f"{workers}_text_document"))
    assert pairs[0] == pairs[1] == pairs[2]


def test_order_is_what_the_bytes_show(tmp_path, texts, write_jsonl_file, preprocess):
    """Two documents exchanged give other bytes, so the test above can fail."""
    changed = [texts[1], texts[0], *texts[2:]]
    for name, documents in (("a", texts), ("b", changed)):
        source = write_jsonl_file(tmp_path / f"{name}.jsonl", documents)
        assert preprocess("--input", source, "--output-prefix", tmp_path / name).returncode == 0
    assert pair(tmp_path / "a_text_document") != pair(tmp_path / "b_text_document")


def test_gzip_and_globs(tmp_path, texts, corpus, write_jsonl_file, preprocess):
    """Quoted globs are read in the order of names, .gz or not, also gzip data under another name."""
    parts = [texts[:200], texts[200:350], texts[350:]]
    for i, part in enumerate(parts):
        write_jsonl_file(tmp_path / f"part{i}.jsonl", part)
    for name in ("part1.jsonl", "part2.jsonl"):
        packed = gzip.compress((tmp_path / name).read_bytes())
        (tmp_path / name).unlink()
        (tmp_path / (f"{name}.gz" if "1" in name else name)).write_bytes(packed)
    assert preprocess("--input", corpus, "--output-prefix", tmp_path / "one").returncode == 0
    result = preprocess("--input", tmp_path / "part*", "--output-prefix", tmp_path / "many")
    assert result.returncode == 0, result.stderr
    assert pair(tmp_path / "one_text_document") == pair(tmp_path / "many_text_document")


def test_several_keys(tmp_path, write_jsonl_file, preprocess, bpe_folder):
    """Each key makes its own dataset, and nothing else is left in the folder."""
    out = tmp_path / "out"
    out.mkdir()
    source = write_jsonl_file(tmp_path / "in.jsonl", [{"q": "alpha1", "a": f"beta {i}", "n": i} for i in range(9)])
    result = preprocess("--input", source, "--output-prefix", out / "x", "--json-keys", "q", "a", "--append-eod")
    assert result.returncode == 0, result.stderr
    names = {"x_q_document.bin", "x_q_document.idx", "x_a_document.bin", "x_a_document.idx"}
    assert {path.name for path in out.iterdir()} == names
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(bpe_folder))
    expected = [token for i in range(9) for token in [*tokenizer.tokenize(f"beta {i}"), tokenizer.eod]]
    assert np.fromfile(out / "x_a_document.bin", dtype=np.uint16).tolist() == expected


def _sentencepiece_model(folder, texts):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[:100]),
        model_prefix=str(folder / "sp"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return ("--tokenizer-model", folder / "sp.model")


def _tiktoken_file(folder, texts):
    pytest.importorskip("tiktoken")
    lines = (f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (folder / "bytes.tiktoken").write_text("".join(lines))
    return ("--tokenizer-model", folder / "bytes.tiktoken")


KINDS = ["GPT2BPETokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "ByteLevelTokenizer"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_types(tmp_path, texts, write_jsonl_file, run_tool, bpe_folder, kind):
    """Every tokenizer type gives the ids of its `tokenize`, document by document."""
    if kind == "ByteLevelTokenizer":
        options = ()
    elif kind == "GPT2BPETokenizer":
        options = ("--vocab-file", bpe_folder / "vocab.json", "--merge-file", bpe_folder / "merges.txt")
    else:
        options = (_tiktoken_file if kind == "TikTokenizer" else _sentencepiece_model)(tmp_path, texts)
    source = write_jsonl_file(tmp_path / "in.jsonl", texts[:40])
    common = ("--input", source, "--output-prefix", tmp_path / "a", "--tokenizer-type", kind, "--append-eod")
    result = run_tool("preprocess_data", *common, *options, "--workers", 2)
    assert result.returncode == 0, result.stderr
    names = ("vocab_file", "merge_file") if kind == "GPT2BPETokenizer" else ("model",)
    given = {name: str(path) for name, path in zip(names, options[1::2])}
    tokenizer = build_tokenizer(kind, **given)
    expected = [token for text in texts[:40] for token in [*tokenizer.tokenize(text), tokenizer.eod]]
    assert np.fromfile(tmp_path / "a_text_document.bin", dtype=np.uint16).tolist() == expected


def test_cut_of_tokenizer_json_is_not_applied(tmp_path, texts, write_jsonl_file, run_tool, bpe_folder):
    """A tokenizer.json that carries a truncation and a padding still gives whole documents."""
    settings = json.loads((bpe_folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    settings["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    source = write_jsonl_file(tmp_path / "in.jsonl", texts[:20])
    for name, folder in (("cut", tmp_path), ("whole", bpe_folder)):
        options = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)
        result = run_tool("preprocess_data", "--input", source, "--output-prefix", tmp_path / name, *options)
        assert result.returncode == 0, result.stderr
    assert pair(tmp_path / "cut_text_document") == pair(tmp_path / "whole_text_document")


def test_plain_progress_lines(tmp_path, corpus, preprocess):
    """Without a terminal there is one plain line for each --log-interval documents, with speed and time left."""
    result = preprocess("--input", corpus, "--output-prefix", tmp_path / "a", "--log-interval", 100)
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("Processed ")]
    assert len(lines) >= 3
    assert all(" docs/s, " in line and " MB/s)" in line and line.endswith(" left.") for line in lines)
    assert "\x1b" not in result.stderr + result.stdout
    assert "600 documents" in result.stdout and "uint16" in result.stdout


def test_bar_on_a_terminal(tmp_path, corpus, bpe_folder):
    """On a terminal a bar with an ETA is drawn, and no plain line."""
    import os
    import pty

    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    options = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(bpe_folder))
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", str(corpus), *options]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(
        [*command, "--output-prefix", str(tmp_path / "a")], stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the last writer has closed the terminal
            break
        shown += chunk
    assert process.wait(40) == 0
    assert b"ETA" in shown and b"600 documents" in shown and b"Processed" not in shown


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("preprocess_data", ("--input", "{corpus}", "--tokenizer-type", "HuggingFaceTokenizer")),
        ("data", ("check", "{prefix}", "--seq-length", "8", "--split", "1", "--vocab-size", "600")),
        (
            "merge_datasets",
            (
                "--input",
                "{folder}",
            ),
        ),
    ],
)
def test_no_torch(tmp_path, corpus, bpe_folder, dataset, tool, arguments):
    """The tools import neither torch nor triton nor megatron.core, at no time of a whole run."""
    prefix = dataset([[1, 2, 3], [4, 5, 6]])
    names = {"corpus": corpus, "prefix": prefix, "folder": Path(prefix).parent}
    argv = [argument.format(**names) for argument in arguments]
    if tool == "preprocess_data":
        argv += ["--tokenizer-model", str(bpe_folder)]
    if tool != "data":
        argv += ["--output-prefix", str(tmp_path / "out")]
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{tool!r}, *{argv!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'tools' / f'{tool}.py')!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'triton', 'transformers', 'megatron.core'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_existing_output_is_replaced(tmp_path, write_jsonl_file, preprocess):
    """A second run replaces the dataset of the first."""
    for documents in (["alpha1 beta"] * 5, ["alpha2"]):
        source = write_jsonl_file(tmp_path / "in.jsonl", documents)
        assert preprocess("--input", source, "--output-prefix", tmp_path / "a").returncode == 0
    assert pair(tmp_path / "a_text_document")[1][18:26] == (1).to_bytes(8, "little")
