"""Token ids that the model does not have end a run with one sentence, on one rank and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.corpora import write_corpus
from tests.training.runs import TINY

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = (
    "the data holds token id 300, but the model's vocabulary has {} ids: find the source with `python tools/data.py "
    "check DATA_PATH --vocab-size {}`, then name the tokenizer that made it, or raise --vocab-size (of NullTokenizer) "
    "or --make-vocab-size-divisible-by"
)
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def one_bad_id(tmp_path_factory):
    """A corpus of 40 documents with one id beyond the vocabulary, in a sample that one rank reads."""
    documents = [[*range(n, n + 32), 100] for n in range(40)]
    documents[20][5] = 300
    return write_corpus(tmp_path_factory.mktemp("data") / "text", documents)


def train(folder, prefix, launcher=()):
    """Run pretrain_gpt.py in `folder` over the whole corpus once and return the finished process."""
    flags = [*TINY.split(), "--data-path", prefix, "--split", "1,0,0", "--train-iters", "10"]
    command = [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_one_rank_ends_with_code_2_and_the_sentence(tmp_path, one_bad_id):
    """Without other ranks the last line on stderr is the sentence, without a traceback."""
    result = train(tmp_path, one_bad_id)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1] == f"pretrain_gpt.py: error: {SENTENCE.format(128, 128)}"
    assert "Traceback" not in result.stderr


def test_two_ranks_end(tmp_path, one_bad_id):
    """A rank that reads the id ends the job: nothing waits for it."""
    result = train(tmp_path, one_bad_id, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    assert result.returncode == 1, result.stderr
    assert f"pretrain_gpt.py: error: {SENTENCE.format(128, 128)}" in result.stderr.splitlines()
