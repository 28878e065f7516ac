"""Samples on their way to the model: order, resume, shares of ranks, document masks."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.training import data_cache
from megatron.training.batch import BatchShape, next_batch
from megatron.training.data import TrainingData, changed_epochs, check_data, tokenizer_of, valid_position
from megatron.training.samplers import SequentialBatches, ShuffledBatches
from tests.training.corpora import counting_corpus
from tests.training.runs import settings

CPU = torch.device("cpu")
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def world():
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def prefix(tmp_path):
    """A corpus of 40 documents of 50 tokens."""
    return counting_corpus(tmp_path / "text", 40, 50)


def build(prefix, words=""):
    """Build the data of a run of 10 steps."""
    words = f"--train-iters 10 --eval-iters 1 --eval-interval 5 {words}"
    config = settings(words, f"--data-path {prefix} --split 30,10,0")
    return TrainingData(config, check_data(config), tokenizer_of(config.data), [(True, True)])


def tokens(iterator, count):
    """Return the tokens of the next micro-batches as lists."""
    return [batch["tokens"].tolist() for batch in islice(iterator, count)]


def test_labels_follow_tokens(prefix):
    """Samples are 32 tokens, labels the same moved by one, every token counted."""
    batch = next(build(prefix).train_iterators(0)[0])
    assert batch["tokens"].shape == batch["labels"].shape == batch["loss_mask"].shape == (2, 32)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert bool((batch["loss_mask"] == 1).all())


def test_end_of_document_is_masked_if_asked_for(prefix):
    """--eod-mask-loss takes the end-of-document tokens out of the loss, and only those."""
    batch = next(build(prefix, "--eod-mask-loss").train_iterators(0)[0])
    assert torch.equal(batch["loss_mask"] == 0, batch["tokens"] == 100)
    assert bool((batch["tokens"] == 100).any())


@pytest.mark.parametrize("words", ["", "--dataloader-type cyclic"])
def test_resume_goes_on_where_it_stood(prefix, words):
    """Iterators that start at 12 consumed samples give what the run from the start gives from there on."""
    data = build(prefix, words)
    whole = tokens(data.train_iterators(0)[0], 20)
    assert tokens(data.train_iterators(12)[0], 14) == whole[6:]
    assert whole[6:8] != whole[:2]


@pytest.mark.parametrize(
    ("words", "iteration", "consumed", "place"),
    [
        ("--eval-interval 10", 50, 20, 20),  # five evaluations of four samples are done, six follow
        ("--eval-interval 25", 50, 20, 0),  # five instead of two were done, three follow: 32 samples of 20
        ("--eval-interval 25", 50, 8, 8),
        ("--eval-interval 10", 100, 44, 0),  # the run is done and is started once more
        ("--eval-interval 10 --eval-iters 3 --train-iters 200", 100, 44, 44),
        ("--eval-interval 10 --skip-train", 50, 20, 0),
    ],
)
def test_validation_goes_on_while_it_lasts(words, iteration, consumed, place):
    """A resumed run reads on in the validation data if its last evaluation finds samples there, else from the start."""
    assert valid_position(settings(f"--train-iters 100 --eval-iters 1 {words}"), iteration, consumed) == place


def test_changed_number_of_passes_is_said(prefix):
    """Other passes over a source are another order; within one pass the number of samples changes nothing."""
    few, more, many = (
        check_data(settings(f"--train-iters {count}", f"--data-path {prefix} --split 30,10,0"))
        for count in (5, 10, 100)
    )
    assert few.report.epochs == more.report.epochs == (1,) and many.report.epochs[0] > 1
    assert not changed_epochs((1,), more) and not changed_epochs((), many)
    [line] = changed_epochs((1,), many)
    assert f"training shuffled 1 passes over its data and now shuffles {many.report.epochs[0]}" in line


def test_index_cache_gives_the_same_samples(prefix):
    """A second start reads the cached index and gives the same samples."""
    first = tokens(build(prefix).train_iterators(0)[0], 5)
    assert tokens(build(prefix).train_iterators(0)[0], 5) == first


def cached_indices(prefix):
    """Return the names of the index files beside the data."""
    return {path.name for path in Path(f"{prefix}/cache/GPTDataset_indices").glob("*.npy")}


@pytest.mark.parametrize(("num_documents", "length"), [(400, 50), (40, 90), (36, 30)])
def test_rewritten_data_has_its_own_index(prefix, tmp_path, num_documents, length):
    """A dataset written anew under its old prefix gives what it would give under a prefix without a cache."""
    build(prefix)
    for path in (prefix, fresh := str(tmp_path / "fresh")):
        counting_corpus(Path(path), num_documents, length)
    assert tokens(build(prefix).train_iterators(0)[0], 20) == tokens(build(fresh).train_iterators(0)[0], 20)


def test_unchanged_data_keeps_its_index(prefix):
    """A second start, and one after the files were copied over themselves, build no index."""
    build(prefix)
    before = cached_indices(prefix)
    for ending in (".bin", ".idx"):
        path = Path(prefix + ending)
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    build(prefix)
    assert cached_indices(prefix) == before != set()


def test_large_index_is_known_by_its_ends(prefix, monkeypatch):
    """Of an index that is too large to hash, the sizes and both ends count."""
    monkeypatch.setattr(data_cache, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(data_cache, "_END_BYTES", 64)
    index, before = Path(f"{prefix}.idx"), data_cache.content_stamp(prefix)
    content = index.read_bytes()
    stamps = {before}
    for place in (40, len(content) - 3):
        index.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        stamps.add(data_cache.content_stamp(prefix))
    assert len(stamps) == 3
    index.write_bytes(content)
    assert data_cache.content_stamp(prefix) == before


def test_half_written_cache_is_built_again(prefix, capsys):
    """Index files cut short by a killed run are removed with a word, and the samples are the same."""
    first = tokens(build(prefix).train_iterators(0)[0], 5)
    files = sorted(Path(f"{prefix}/cache/GPTDataset_indices").glob("*-train-*.npy"))
    assert len(files) == 3
    os.truncate(files[0], os.path.getsize(files[0]) - 4)
    os.truncate(files[1], 0)
    capsys.readouterr()
    assert tokens(build(prefix).train_iterators(0)[0], 5) == first
    told = capsys.readouterr().out
    assert str(files[0]) in told and str(files[1]) in told and str(files[2]) not in told


def test_cache_that_cannot_be_written_is_named(prefix, tmp_path):
    """A cache folder that is a file is refused with its name and the flag to change."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--data-cache-path") as caught:
        build(prefix, f"--data-cache-path {tmp_path}/file")
    assert f"{tmp_path}/file" in str(caught.value)


def test_too_little_data_without_weights_is_refused(tmp_path):
    """Several prefixes without weights are read once; wanting more is refused with both numbers."""
    paths = " ".join(counting_corpus(tmp_path / name, 10, 20) for name in "ab")
    config = settings("--train-iters 10", f"--data-path {paths} --split 1,0,0")
    data = TrainingData(config, check_data(config), tokenizer_of(config.data), [(True, True)])
    with pytest.raises(ValueError, match="training takes 40 samples, but one pass over the data has"):
        data.train_iterators(0)


def test_weighted_blend_repeats(tmp_path):
    """With weights both sources appear and are repeated as often as needed."""
    one = counting_corpus(tmp_path / "one", 10, 40, vocab_size=40)
    other = counting_corpus(tmp_path / "other", 10, 40, vocab_size=90)
    config = settings("--train-iters 10", f"--data-path 0.5 {one} 0.5 {other} --split 1,0,0")
    data = TrainingData(config, check_data(config), tokenizer_of(config.data), [(True, True)])
    ends = {end for batch in tokens(data.train_iterators(0)[0], 20) for row in batch for end in row if end in (40, 90)}
    assert ends == {40, 90}


def test_stage_without_data_reads_nothing(prefix):
    """An inner pipeline stage has no iterator, unless document masks need the tokens everywhere."""
    for words, has_data in (("", False), ("--reset-attention-mask", True)):
        config = settings(f"--train-iters 5 {words}", f"--data-path {prefix}")
        data = TrainingData(config, check_data(config), tokenizer_of(config.data), [(False, False), (False, True)])
        assert [iterator is not None for iterator in data.train_iterators(0)] == [has_data, True]


@pytest.mark.parametrize("kind", [SequentialBatches, ShuffledBatches])
@pytest.mark.parametrize(("micro", "ranks"), [(1, 4), (2, 2), (4, 1), (2, 4)])
def test_layout_does_not_change_the_samples(kind, micro, ranks):
    """Whatever the micro-batch and the number of ranks, a global batch of 8 holds the same samples."""
    options = {"seed": 5} if kind is ShuffledBatches else {}
    per_rank = [list(islice(kind(64, 8, micro, rank, ranks, **options), 24 // micro // ranks)) for rank in range(ranks)]
    steps = 8 // micro // ranks
    batches = [
        {sample for mine in per_rank for batch in mine[step * steps : (step + 1) * steps] for sample in batch}
        for step in range(3)
    ]
    reference = list(islice(kind(64, 8, 8, 0, 1, **options), 3))
    assert batches == [set(batch) for batch in reference]
    assert sum(len(batch) for batch in batches) == 24


def test_shuffled_passes_cover_the_data_in_another_order():
    """Each pass has all samples once; the next pass has another order; the seed decides both."""
    samples = [batch[0] for batch in islice(ShuffledBatches(10, 0, 1, 0, 1, seed=3), 20)]
    assert sorted(samples[:10]) == sorted(samples[10:]) == list(range(10))
    assert samples[:10] != samples[10:] != list(range(10))
    assert samples == [batch[0] for batch in islice(ShuffledBatches(10, 0, 1, 0, 1, seed=3), 20)]


def one_batch(row, **resets):
    """Return the device batch of one sample."""
    sample = torch.tensor([row])
    data = {"tokens": sample, "labels": sample, "loss_mask": torch.ones(1, len(row))}
    return next_batch(iter([data]), BatchShape(1, len(row), 9, **resets), CPU)


def test_plain_positions_need_no_mask():
    """Without resets positions count through and attention is plain causal."""
    batch = one_batch([1, 9, 2, 3])
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]]
    assert batch.attention_mask is None


def test_documents_are_separated():
    """Positions restart after an end of document, which itself belongs to the document it ends."""
    batch = one_batch([1, 2, 9, 3, 9, 4, 5], reset_position_ids=True, reset_attention_mask=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    visible = (~batch.attention_mask[0, 0]).int().tolist()
    assert visible == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_end_of_data_is_a_fault_with_a_reason():
    """An iterator that runs dry stops the run with a sentence instead of a bare StopIteration."""
    with pytest.raises(RuntimeError, match="the data ended"):
        next_batch(iter([]), BatchShape(1, 4, 9), CPU)


@pytest.mark.parametrize(
    "tokens, labels, bad", [([0, 9], [9, 0], None), ([0, 10], [1, 1], 10), ([1, 1], [1, 12], 12), ([-1, 0], [0, 0], -1)]
)
def test_token_ids_are_those_of_the_model(tokens, labels, bad):
    """The first and the last id pass; one more, in tokens or labels, and negative ones do not."""
    data = {"tokens": torch.tensor([tokens]), "labels": torch.tensor([labels]), "loss_mask": torch.ones(1, 2)}
    shape = BatchShape(1, 2, 9, num_ids=10)
    if bad is None:
        assert next_batch(iter([data]), shape, CPU).tokens.tolist() == [tokens]
        return
    with pytest.raises(ValueError, match=f"token id {bad}, but the model's vocabulary has 10 ids"):
        next_batch(iter([data]), shape, CPU)


def test_limit_of_token_ids(prefix):
    """The limit is the embedding with its padding, unless --unpadded-vocab-size takes that out of the loss."""
    for words, limit in (("", 128), ("--unpadded-vocab-size 110", 110)):
        config = settings(f"--train-iters 1 {words}", f"--data-path {prefix}").with_vocab(101)
        data = TrainingData(config, check_data(config), tokenizer_of(config.data), [(True, True)])
        assert data.shape.num_ids == limit
