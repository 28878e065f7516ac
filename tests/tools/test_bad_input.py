"""tools/preprocess_data.py on damaged input: text, exit code, nothing left behind, and never a hang."""

from __future__ import annotations

import gzip
import json
import os
import resource
from pathlib import Path

import pytest

GOOD = b'{"text": "alpha1 alpha2"}'

# name: (line, what the error says after FILE:2:)
BAD_LINES = {
    "broken JSON": (b'{"text": "alpha1"', "not JSON: Expecting ',' delimiter at column 18"),
    "two objects": (GOOD + GOOD, "not JSON: Extra data at column 26"),
    "missing key": (b'{"content": "alpha1"}', "no key 'text': the keys are 'content'"),
    "null text": (b'{"text": null}', "'text' is not text: it is null"),
    "number": (b'{"text": 5}', "'text' is not text: it is a number"),
    "list of numbers": (b'{"text": ["alpha1", 5]}', "'text' is not text: it is a list that holds a number"),
    "no object": (b'["alpha1"]', "not a JSON object: it is a list"),
    "blank line": (b"", "blank line"),
    "white space": (b"  \t\r", "blank line"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, "byte order mark: save the file as UTF-8 without one"),
    "UTF-16": ("\ufeff".encode("utf-16-le") + GOOD, "byte order mark: save the file as UTF-8 without one"),
    "latin-1 byte": (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at column 14"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "lone surrogate: \\ud800 in 'text' is half a character"),
    "control character": (b'{"text": "a\x00b"}', "not JSON: Invalid control character at column 12"),
    "deep nesting": (b"[" * 200_000, "not JSON: "),
    "huge number": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
}


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_stops(tmp_path, out, preprocess, name):
    """A line that is no document ends the tool with code 1, file, line and reason, and nothing written."""
    line, reason = BAD_LINES[name]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([GOOD, line, GOOD, b""]))
    result = preprocess("--input", source, "--output-prefix", out / "a", "--workers", 2)
    assert result.returncode == 1
    assert f"preprocess_data.py: error: {source}:2: {reason}" in result.stderr
    assert "Traceback" not in result.stderr
    assert files_in(out) == []


def test_bad_lines_are_skipped_and_counted(tmp_path, out, preprocess):
    """With --on-bad-line skip the good lines are written and the bad ones counted by kind."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(part for line, _ in BAD_LINES.values() for part in (GOOD, line)) + b"\n")
    options = ("--output-prefix", out / "a", "--on-bad-line", "skip")
    result = preprocess("--input", source, *options, "--workers", 2)
    assert result.returncode == 0, result.stderr
    good, bad = len(BAD_LINES), len(BAD_LINES)
    assert f"{good} documents" in result.stdout
    assert (
        f"skipped {bad} of {good + bad} lines: 5 not JSON, 3 'text' is not text, 2 blank line, 2 byte" in result.stdout
    )
    assert f"skipped {source}:12: " in result.stderr
    expected = tmp_path / "good.jsonl"
    expected.write_bytes((GOOD + b"\n") * good)
    assert preprocess("--input", expected, "--output-prefix", out / "b").returncode == 0
    assert (out / "a_text_document.bin").read_bytes() == (out / "b_text_document.bin").read_bytes()
    assert (out / "a_text_document.idx").read_bytes() == (out / "b_text_document.idx").read_bytes()


def test_many_bad_lines_stay_readable(tmp_path, out, preprocess):
    """Of 500 bad lines 20 are shown, the others only counted."""
    source = tmp_path / "in.jsonl"
    source.write_bytes((GOOD + b"\n\n") * 500)
    result = preprocess("--input", source, "--output-prefix", out / "a", "--on-bad-line", "skip")
    assert result.returncode == 0
    assert result.stderr.count("skipped ") == 20
    assert "more than 20 bad lines: the others are only counted" in result.stderr
    assert "skipped 500 of 1000 lines: 500 blank line" in result.stdout


def test_first_bad_line_is_named(tmp_path, out, preprocess):
    """With many workers it is still the first bad line of the input that is named."""
    source = tmp_path / "in.jsonl"
    long_line = json.dumps({"text": "alpha1 " * 200}).encode()
    source.write_bytes(b"\n".join([long_line] * 700 + [b""] + [long_line] * 100 + [b"x"] * 100) + b"\n")
    result = preprocess("--input", source, "--output-prefix", out / "a", "--workers", 5)
    assert result.returncode == 1
    assert f"{source}:701: blank line" in result.stderr


def test_refused_text_before_a_broken_line(tmp_path, out, run_tool):
    """The first bad line is named also where the tokenizer, which runs after the parser, is the one to refuse it."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n{"text": "two"}\n\n')
    options = ("--input", source, "--output-prefix", out / "a", "--tokenizer-type", "NullTokenizer", "--vocab-size", 9)
    result = run_tool("preprocess_data", *options)
    assert result.returncode == 1 and f"{source}:2: refused by the tokenizer" in result.stderr


def test_text_the_tokenizer_refuses(tmp_path, out, run_tool):
    """Text that only the tokenizer finds wrong is a bad line as well, and its neighbors survive a skip."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1 2"}\n{"text": "1 two"}\n{"text": "3"}\n{"text": "99"}\n{"text": "4"}\n')
    options = ("--input", source, "--output-prefix", out / "a", "--tokenizer-type", "NullTokenizer", "--vocab-size", 9)
    result = run_tool("preprocess_data", *options)
    assert result.returncode == 1 and f"{source}:2: refused by the tokenizer" in result.stderr
    result = run_tool("preprocess_data", *options, "--on-bad-line", "skip")
    assert result.returncode == 0
    assert "3 documents, 4 tokens" in result.stdout and "skipped 2 of 5 lines: 2 refused" in result.stdout


@pytest.mark.parametrize("content", [b"", gzip.compress(b""), b"\n\n"], ids=["empty", "empty gzip", "blank lines"])
def test_no_document(tmp_path, out, preprocess, content):
    """No document at all is an error, not an empty dataset that training cannot open."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    result = preprocess("--input", source, "--output-prefix", out / "a", "--on-bad-line", "skip")
    assert result.returncode == 1
    assert "error: 0 documents" in result.stderr
    assert files_in(out) == []


def test_only_empty_documents(tmp_path, out, preprocess, write_jsonl_file):
    """Documents without one token are an error too: the .bin would be empty."""
    source = write_jsonl_file(tmp_path / "in.jsonl", ["", ""])
    result = preprocess("--input", source, "--output-prefix", out / "a", "--append-eod")
    assert result.returncode == 1 and "2 documents without a token" in result.stderr
    assert files_in(out) == []


def test_damaged_gzip(tmp_path, out, preprocess, corpus):
    """A gzip file that is cut short ends the tool with code 1, even where bad lines are skipped."""
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(corpus.read_bytes())[:-20_000])
    result = preprocess("--input", source, "--output-prefix", out / "a", "--on-bad-line", "skip")
    assert result.returncode == 1
    assert f"{source} is damaged gzip data after line " in result.stderr
    assert files_in(out) == []


def test_other_compression(tmp_path, out, preprocess):
    """A zstd file is named as such instead of being called bad JSON."""
    source = tmp_path / "in.jsonl.zst"
    source.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    result = preprocess("--input", source, "--output-prefix", out / "a")
    assert result.returncode == 1 and "is compressed with zstd" in result.stderr


# name: (arguments, words of the sentence); OUT and IN stand for an existing folder and file
USAGE = {
    "missing input": (("--input", "OUT/none.jsonl"), "none.jsonl matches no file"),
    "empty glob": (("--input", "OUT/*.jsonl"), "*.jsonl matches no file"),
    "input is a folder": (("--input", "OUT"), "is a directory: name its files"),
    "input twice": (("--input", "IN", "IN"), "more than once"),
    "missing output folder": (("--output-prefix", "OUT/no/a"), "OUT/no of --output-prefix OUT/no/a does not exist"),
    "workers": (("--workers", "0"), "--workers is 0, allowed are whole numbers from 1"),
    "log interval": (("--log-interval", "0"), "--log-interval is 0"),
    "policy": (("--on-bad-line", "stop"), "invalid choice: 'stop'"),
    "split sentences": (("--split-sentences",), "--split-sentences is not offered"),
    "optimal workers": (("--find-optimal-num-workers",), "--find-optimal-num-workers is not offered"),
    "unknown option": (("--json-key", "text"), "unknown option --json-key, did you mean --json-keys?"),
    "key twice": (("--json-keys", "text", "text"), "names a key twice"),
    "tokenizer type": (("--tokenizer-type", "Bert"), "--tokenizer-type is 'Bert', allowed are"),
    "tokenizer files": (("--tokenizer-type", "GPT2BPETokenizer"), "GPT2BPETokenizer needs --vocab-file"),
    "tokenizer model": (("--tokenizer-type", "Llama2Tokenizer"), "Llama2Tokenizer cannot load its files"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage(tmp_path, out, preprocess, corpus, name):
    """What the command line got wrong is said in one sentence, code 2, before any work."""
    arguments, words = USAGE[name]

    def fill(word):
        return str(word).replace("OUT", str(out)).replace("IN", str(corpus))

    options = {"--input": (corpus,), "--output-prefix": (out / "a",)}
    options[arguments[0]] = arguments[1:]
    flat = [fill(word) for flag, values in options.items() for word in (flag, *values)]
    result = preprocess(*flat)
    assert result.returncode == 2, result.stderr
    assert fill(words) in result.stderr
    assert "Traceback" not in result.stderr
    assert files_in(out) == []


def test_accepted_without_effect(tmp_path, out, preprocess, corpus):
    """Megatron's --partitions and --keep-sequential-samples change nothing but a note, and leave no files about."""
    before = files_in(corpus.parent)
    options = ("--partitions", "4", "--keep-sequential-samples", "--workers", "2")
    result = preprocess("--input", corpus, "--output-prefix", out / "a", *options)
    assert result.returncode == 0
    assert "--partitions: no effect" in result.stderr and "--keep-sequential-samples: no effect" in result.stderr
    assert files_in(corpus.parent) == before
    assert files_in(out) == ["a_text_document.bin", "a_text_document.idx"]


def test_disk_full(tmp_path, out, preprocess, corpus):
    """A file that cannot grow ends the tool with code 1; the dataset that stood there before is untouched."""
    assert preprocess("--input", corpus, "--output-prefix", out / "a").returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    result = preprocess("--input", corpus, "--output-prefix", out / "a", preexec_fn=limit)
    assert result.returncode == 1
    assert "File too large: nothing was written" in result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path, out, preprocess):
    """A file without read permission is named."""
    source = Path(tmp_path / "in.jsonl")
    source.write_bytes(GOOD)
    source.chmod(0)
    result = preprocess("--input", source, "--output-prefix", out / "a")
    assert result.returncode == 2 and "permission denied" in result.stderr


def test_endless_line(tmp_path, monkeypatch):
    """A file without line ends is refused before it fills the memory."""
    from megatron.training.datasets import jsonl

    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 3_000_000)
    source = tmp_path / "in.bin"
    source.write_bytes(GOOD + b"\n" + b"x" * 5_000_000)
    with pytest.raises(ValueError, match=r"in.bin:2: the line is longer than 3000000 bytes"):
        list(jsonl.read_blocks([str(source)], 1 << 16))
