"""Bad data is refused in one sentence, at once, before anything is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.data import check_data, num_samples_per_split
from tests.training.corpora import counting_corpus, write_corpus
from tests.training.runs import TINY, settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def prefix(tmp_path):
    """A good corpus of 50 documents of 20 tokens."""
    return counting_corpus(tmp_path / "text", 50, 20)


def source(prefix, split="40,10,0", words=""):
    """Check the data of a run over 5 steps of 4 samples with one evaluation batch."""
    words = f"--train-iters 5 --eval-iters 1 {words}"
    return check_data(settings(words, f"--data-path {prefix} --split {split}"))


def refusal(*args, **options):
    """Return the sentence with which data is refused."""
    with pytest.raises(ValueError) as caught:
        source(*args, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_good_corpus_is_described(prefix):
    """Each split is described by its tokens, its samples and how often they go through the tokens."""
    found = source(prefix)
    assert found.num_samples == (20, 4, 0)
    assert found.report.lines == (
        "    training: 800 tokens in 40 documents, 20 samples of 32 = 0.80 epochs",
        "    validation: 200 tokens in 10 documents, 4 samples of 32 = 0.64 epochs",
    )


def test_missing_prefix_is_named(tmp_path):
    """A prefix without files is refused by the name of the missing file."""
    assert f"{tmp_path}/none.idx does not exist" in refusal(tmp_path / "none")


def test_cut_bin_names_file_and_both_numbers(prefix):
    """A .bin shorter than its index says is refused with the bytes it has and the bytes it should have."""
    os.truncate(prefix + ".bin", 1999)
    text = refusal(prefix)
    assert f"{prefix}.bin has 1999 bytes" in text
    assert "says 2000" in text


def test_cut_index_is_refused(prefix):
    """An index shorter than its header announces is refused with both sizes."""
    os.truncate(prefix + ".idx", 1000)
    text = refusal(prefix)
    assert "has 1000 bytes" in text
    assert str(34 + 50 * 12 + 51 * 8) in text


def test_empty_validation_split_is_refused_with_a_better_one(tmp_path):
    """A split that leaves no document to validation is refused, and the split it proposes works."""
    prefix = counting_corpus(tmp_path / "few", 9, 20)
    text = refusal(prefix, "949,50,1")
    assert f"validation of {prefix} (9 documents)" in text
    assert "--eval-iters 0" in text
    assert source(prefix, text.split("--split ")[2].split(" ")[0]).num_samples[:2] == (20, 4)


def test_validation_that_nobody_reads_may_be_empty(tmp_path):
    """Without evaluations a split without validation documents is accepted."""
    prefix = counting_corpus(tmp_path / "few", 9, 20)
    found = check_data(settings("--train-iters 5", f"--data-path {prefix} --split 949,50,1"))
    assert found.num_samples == (20, 0, 0)


def test_empty_test_split_is_only_noted(prefix):
    """A split that leaves no document to the test takes the test away and says so."""
    found = source(prefix, "900,100,1")
    assert found.num_samples == (20, 4, 0)
    assert len(found.notes) == 1
    assert "test" in found.notes[0]


def test_documents_without_tokens_are_refused(tmp_path):
    """Training on documents that are all empty would be searched for ever: refused."""
    prefix = write_corpus(tmp_path / "empty", [[], [], [5, 6]])
    assert f"training of {prefix} (3 documents)" in refusal(prefix, "2,1,0")


def test_paths_per_split(tmp_path, prefix):
    """Prefixes of their own give each split all their documents; a split without a prefix gets no samples."""
    other = counting_corpus(tmp_path / "other", 3, 11)
    found = check_data(
        settings("--train-iters 5 --eval-iters 1", f"--train-data-path {prefix} --valid-data-path {other}")
    )
    assert found.num_samples == (20, 4, 0)
    assert "33 tokens in 3 documents" in found.report.lines[1]


def test_evaluations_are_counted():
    """Validation needs samples for each evaluation, the one at the end, and the one at the start if asked for."""
    words = "--train-iters 10 --eval-iters 3 --eval-interval 4"
    assert num_samples_per_split(settings(words)) == (40, 36, 12)
    assert num_samples_per_split(settings(words + " --eval-at-start")) == (40, 48, 12)


def test_program_ends_with_code_2_and_one_sentence(tmp_path):
    """The case that hangs elsewhere (few documents, usual split) ends the program, with a sentence and code 2."""
    prefix = counting_corpus(tmp_path / "few", 9, 20)
    words = f"{TINY} --data-path {prefix} --split 949,50,1 --train-iters 5".replace("--eval-iters 0", "--eval-iters 1")
    result = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words.split()], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("pretrain_gpt.py: error: --split 949,50,1 leaves no token for validation")
    assert result.stderr.count("\n") == 1
