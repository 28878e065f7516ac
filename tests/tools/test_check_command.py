"""tools/data.py check: splits, epochs and blends as megatron.core would build them, and its exit codes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.datasets.blend import (
    parse_data_path,
    parse_split,
    samples_of_source,
    split_ranges,
    suggest_split,
    whole_epochs,
)


def test_two_sources(dataset, run_tool):
    """Each source's documents, tokens and epochs stand in one line a split; all is well: code 0."""
    one, two = dataset([[1] * 100] * 1000), dataset([[2] * 50] * 1000, np.int32)
    arguments = ("--split", "949,50,1", "--train-samples", 3000, "--seq-length", 64, "--vocab-size", 3)
    result = run_tool("data", "check", 1, one, 3, two, *arguments)
    assert result.returncode == 0, result.stderr
    assert f"{one}: 1000 documents, 100000 tokens, uint16, weight 0.2500" in result.stdout
    assert (
        "train: 949 documents, 94900 tokens, 1482.8 samples of 64 an epoch, 754 samples wanted: 0.51 ep"
        in result.stdout
    )
    assert (
        "train: 949 documents, 47450 tokens, 741.4 samples of 64 an epoch, 2262 samples wanted: 3.05 epo"
        in result.stdout
    )
    assert "test: 1 documents, 50 tokens" in result.stdout
    assert "ids from 2 to 2, vocabulary 3" in result.stdout
    assert result.stdout.rstrip().endswith("training can read this data")


def test_empty_split(dataset, run_tool):
    """20 documents with 989,10,1 leave none for validation, where core loops for ever: code 1 and a better split."""
    prefix = dataset([[1] * 100] * 20)
    arguments = ("check", prefix, "--train-samples", 100, "--seq-length", 64)
    result = run_tool("data", *arguments, "--split", "989,10,1")
    assert result.returncode == 1
    assert f"--split 989,10,1 leaves no token for valid of {prefix} (20 documents): use for example --split 18,1,1" in (
        result.stderr
    )
    assert run_tool("data", *arguments, "--split", "18,1,1").returncode == 0
    assert run_tool("data", *arguments, "--split", "989,10,1", "--valid-samples", 0).returncode == 0


def test_empty_test_split(dataset, run_tool):
    """50 documents with 949,50,1 leave no test document: a note and a better split, since training goes without."""
    prefix = dataset([[1] * 100] * 50)
    arguments = ("check", prefix, "--train-samples", 100, "--seq-length", 64)
    result = run_tool("data", *arguments, "--split", "949,50,1")
    assert result.returncode == 0
    assert (
        f"note: --split 949,50,1 leaves no token for test of {prefix} (50 documents): it is left out" in result.stdout
    )
    assert "use for example --split 47,2,1" in result.stdout
    assert "note" not in run_tool("data", *arguments, "--split", "47,2,1").stdout


def test_no_validation_part(dataset, run_tool):
    """A split without a validation part is said to need --eval-iters 0."""
    result = run_tool("data", "check", dataset([[1] * 100]), "--split", "1", "--seq-length", 64)
    assert result.returncode == 0 and "note: --split 1 has no validation part: training needs --eval-iters 0" in (
        result.stdout
    )


def test_all_problems_at_once(dataset, run_tool):
    """A cut file, a missing one and an id outside the vocabulary are all named in one run: code 1."""
    cut, sound = dataset([[1, 2, 3]] * 9), dataset([[1, 2, 70]] * 9)
    os.truncate(f"{cut}.bin", 50)
    words = ("0.5", cut, "0.2", sound, "0.3", f"{sound}x")
    options = ("--split", "1", "--train-samples", 4, "--seq-length", 2, "--vocab-size", 70)
    result = run_tool("data", "check", "--data-path", *words, *options)
    assert result.returncode == 1
    assert f"{cut}.bin has 50 bytes, its index says 54" in result.stderr
    assert f"{sound}x.idx does not exist" in result.stderr
    assert f"{sound}.bin: token 2 (in sequence 0) is 70, allowed are 0 to 69" in result.stderr
    assert "training would fail: 3 problems" in result.stderr


def test_prefixes_without_weights(dataset, run_tool):
    """Prefixes without weights are read once: asking for more samples than they hold is a problem."""
    words = [dataset([[1] * 65] * 10) for _ in range(3)]
    options = ("--split", "1", "--seq-length", 64, "--train-samples")
    assert run_tool("data", "check", *words, *options, 30).returncode == 0
    result = run_tool("data", "check", *words, *options, 31)
    assert result.returncode == 1
    assert "31 train samples are wanted, but prefixes without weights are read once and give 30" in result.stderr


def test_split_data_paths(dataset, run_tool):
    """--train-data-path and its like are checked whole, without a split."""
    train, valid = dataset([[1] * 100] * 3), dataset([[1] * 100])
    paths = ("--train-data-path", train, "--valid-data-path", valid)
    result = run_tool("data", "check", *paths, "--seq-length", 64, "--train-iters", 10, "--global-batch-size", 2)
    assert result.returncode == 0, result.stderr
    assert "train: 3 documents, 300 tokens, 4.7 samples of 64 an epoch, 20 samples wanted: 4.27 ep" in result.stdout
    assert "valid: 1 documents" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--data-path is empty"),
        (("1", "a", "b"), "weights and prefixes must come in pairs"),
        (("1", "a", "b", "c"), "'b' where a weight should be"),
        (("0", "a", "1", "b"), "the weight 0, allowed are numbers above 0"),
        (("a", "--split", "9,x"), "--split is '9,x', expected are up to three numbers"),
        (("a", "--split", "0,0"), "at least one of its numbers must be above 0"),
        (("a", "--split", "1,1,1,1"), "expected are up to three numbers"),
        (("a", "--train-samples", "0"), "--train-samples is 0"),
        (("a", "--train-iters", "5"), "--train-iters needs --global-batch-size"),
        (("a", "--train-data-path", "b"), "exclude --data-path and --split"),
    ],
)
def test_usage(capsys, arguments, said):
    """A wrong command line is answered with one sentence and code 2."""
    from megatron.training.datasets.check_cli import main

    assert main(["check", "--seq-length", "8", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_data_path_forms():
    """Weights come before prefixes; an odd number of words, or no number among them, is prefixes alone."""
    assert parse_data_path(["a"]).weights is None
    assert parse_data_path(["a", "b", "c", "d"]).prefixes == ("a", "b", "c", "d")
    blend = parse_data_path(["30", "a", "70", "b"])
    assert blend.prefixes == ("a", "b") and blend.weights == (30.0, 70.0) and blend.share(1) == 0.7


splits = st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any)


@settings(deadline=None, max_examples=150)
@given(split=splits, num_sequences=st.integers(1, 3000))
def test_ranges_as_core(split, num_sequences):
    """Split ranges equal those of megatron.core for any split and any number of sequences."""
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    text = ",".join(map(str, split))
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(text))
    expected = [
        None if part is None else tuple(int(round(border * float(num_sequences))) for border in part) for part in matrix
    ]
    assert split_ranges(parse_split(text), num_sequences) == expected


@settings(deadline=None, max_examples=150)
@given(samples=st.integers(0, 5000), tokens=st.integers(1, 5000), seq_length=st.integers(1, 64))
def test_epochs_as_core(samples, tokens, seq_length):
    """The number of epochs laid out equals that of megatron.core's GPT dataset."""
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    config = SimpleNamespace(sequence_length=seq_length, add_extra_token_to_sequence=1)
    stub = SimpleNamespace(num_samples=samples, config=config)
    assert whole_epochs(samples, seq_length, tokens) == gpt_dataset.GPTDataset._get_num_epochs(stub, tokens)


def test_samples_of_a_source_as_core():
    """The samples asked of each source equal those of megatron.core, surplus included."""
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    blend = parse_data_path(["1", "a", "2", "b", "4", "c"])
    shares = [blend.share(i) for i in range(3)]
    expected = builder._get_size_per_split_per_dataset(shares, [12345], surplus=0.005)
    assert [[samples_of_source(12345, blend, i)] for i in range(3)] == expected


@settings(deadline=None, max_examples=300)
@given(split=splits, counts=st.lists(st.integers(1, 500), min_size=1, max_size=4))
def test_suggested_split_works(split, counts):
    """A suggested split leaves no wanted split of any source empty; none is suggested only without a train share."""
    shares = parse_split(",".join(map(str, split)))
    suggestion = suggest_split(shares, counts)
    if suggestion is None:
        assert shares[0] == 0
        return
    for count in counts:
        ranges = split_ranges(parse_split(suggestion), count)
        assert ranges[0] is not None
        assert all(part is None or part[1] > part[0] for part in ranges)
