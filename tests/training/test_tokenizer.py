"""Each tokenizer type reads its own files, ends documents, and needs no torch."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = "hello wörld, this is text"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A folder with a byte-level BPE as tokenizer.json and as vocab.json with merges.txt."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT] * 10, vocab_size=280, special_tokens=["<|endoftext|>", "<stop>"])
    bpe.save(str(folder / "tokenizer.json"))
    bpe.save_model(str(folder))
    return folder


def check_round_trip(tokenizer):
    """Every id is below the vocabulary size, the text comes back, and the end of documents is one id."""
    ids = tokenizer.tokenize(TEXT)
    assert ids and all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.detokenize(ids) == TEXT
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.eod not in ids
    json.dumps(tokenizer.unique_identifiers)


def test_huggingface_folder_and_file(bpe):
    """A folder and its tokenizer.json are the same tokenizer; the end token is found by its usual name."""
    folder, file = (build_tokenizer("HuggingFaceTokenizer", str(path)) for path in (bpe, bpe / "tokenizer.json"))
    check_round_trip(folder)
    assert folder.tokenize(TEXT) == file.tokenize(TEXT)
    assert folder.eod == file.eod == 0


def test_huggingface_config_names_the_end_token(bpe, tmp_path):
    """eos_token in tokenizer_config.json decides, as text or as an object."""
    (tmp_path / "tokenizer.json").write_text((bpe / "tokenizer.json").read_text())
    for entry in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
        assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == 1


def test_gpt2_files(bpe):
    """vocab.json and merges.txt are a GPT-2 tokenizer."""
    tokenizer = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(bpe / "vocab.json"), merge_file=str(bpe / "merges.txt")
    )
    check_round_trip(tokenizer)


def test_sentencepiece(tmp_path):
    """A SentencePiece model serves two types; the Llama 2 one puts a start token first."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(f"{TEXT}\nand more of it\n" * 40, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=24, minloglevel=2
    )
    plain = build_tokenizer("GPTSentencePieceTokenizer", str(tmp_path / "m.model"))
    check_round_trip(plain)
    llama = build_tokenizer("Llama2Tokenizer", str(tmp_path / "m.model"))
    assert llama.tokenize(TEXT)[1:] == plain.tokenize(TEXT)


def test_tiktoken(tmp_path):
    """Megatron's JSON vocabulary moves ids behind its special tokens; plain rank files end with the end token."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([value]) for value in range(256)] + [b"he", b"ll"]
    encoded = [base64.b64encode(token).decode() for token in tokens]
    entries = [{"rank": rank, "token_bytes": text, "token_str": ""} for rank, text in enumerate(encoded)]
    (tmp_path / "v.json").write_text(json.dumps(entries))
    (tmp_path / "v.tiktoken").write_text("".join(f"{text} {rank}\n" for rank, text in enumerate(encoded)))
    megatron = build_tokenizer("TikTokenizer", str(tmp_path / "v.json"), vocab_size=1258)
    check_round_trip(megatron)
    assert megatron.tokenize("hell") == [1256, 1257] and megatron.vocab_size == 1258
    ranks = build_tokenizer("TikTokenizer", str(tmp_path / "v.tiktoken"))
    check_round_trip(ranks)
    assert ranks.tokenize("hell") == [256, 257] and ranks.eod == 258


def test_numbers_and_bytes():
    """The null tokenizer reads numbers and adds one id; the byte tokenizer reads UTF-8."""
    null = build_tokenizer("NullTokenizer", vocab_size=255)
    assert (null.vocab_size, null.eod, null.tokenize("1 2 255")) == (256, 255, [1, 2, 255])
    check_round_trip(build_tokenizer("ByteLevelTokenizer"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Unknown",), ["'Unknown'", "HuggingFaceTokenizer"]),
        (("NullTokenizer",), ["--vocab-size"]),
        (("HuggingFaceTokenizer",), ["--tokenizer-model"]),
        (("TikTokenizer", "/none/such"), ["/none/such", "does not exist"]),
        (("GPT2BPETokenizer",), ["--vocab-file"]),
    ],
)
def test_refusals(arguments, words):
    """Unknown types, missing flags and missing files are refused in one sentence."""
    with pytest.raises(ValueError) as caught:
        build_tokenizer(*arguments)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_no_end_token_is_refused(bpe, tmp_path):
    """A tokenizer whose named end token does not exist is refused with that name."""
    (tmp_path / "tokenizer.json").write_text((bpe / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(ValueError, match="<none>"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_data_preparation_needs_no_torch(bpe):
    """Reading a tokenizer.json imports neither torch nor transformers."""
    code = (
        "import sys\n"
        "from megatron.training.tokenizer import build_tokenizer\n"
        f"build_tokenizer('HuggingFaceTokenizer', {str(bpe)!r}).tokenize('text')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
