"""Names, tracker and retention of a checkpoint directory."""

from __future__ import annotations

import pytest

from megatron.training import checkpointing_layout as layout


def _make(root, *iterations):
    for iteration in iterations:
        layout.begin(root, iteration).joinpath(layout.CONFIG).write_text("{}")
        layout.publish(root, iteration)
        layout.write_tracker(root, iteration)


def test_the_tracker_names_what_is_loaded(tmp_path):
    """Without --ckpt-step the tracker decides, with it the step does."""
    assert layout.find_checkpoint(tmp_path, None) is None
    assert layout.find_checkpoint(tmp_path / "nowhere", None) is None
    _make(tmp_path, 10, 20)
    assert layout.find_checkpoint(tmp_path, None) == (tmp_path / "iter_0000020", 20)
    assert layout.find_checkpoint(tmp_path, 10) == (tmp_path / "iter_0000010", 10)
    assert (tmp_path / layout.TRACKER).read_text() == "20"


@pytest.mark.parametrize(
    ("text", "message"),
    [("twenty", "holds 'twenty', it must hold an iteration"), ("", "holds ''"), ("30", "names iteration 30, which")],
)
def test_a_bad_tracker_is_one_sentence(tmp_path, text, message):
    """Garbage and iterations that are gone are refused, with what there is."""
    _make(tmp_path, 10)
    (tmp_path / layout.TRACKER).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        layout.find_checkpoint(tmp_path, None)
    assert "it holds 10" in str(error.value)


def test_one_checkpoint_instead_of_its_parent_is_explained(tmp_path):
    """--load takes the parent of iter_NNNNNNN, and says so."""
    _make(tmp_path, 10)
    with pytest.raises(ValueError, match="--load takes its parent"):
        layout.find_checkpoint(tmp_path / "iter_0000010", None)


def test_release_is_known(tmp_path):
    """Converted checkpoints have no iteration."""
    (tmp_path / "release").mkdir()
    (tmp_path / layout.TRACKER).write_text("release\n")
    assert layout.find_checkpoint(tmp_path, None) == (tmp_path / "release", "release")


@pytest.mark.parametrize(
    ("keep_last", "retain", "left"),
    [
        (None, None, [1, 2, 3, 4, 5, 6, 7]),
        (2, None, [6, 7]),
        (None, 3, [3, 6, 7]),
        (2, 3, [3, 6, 7]),
        (1, 2, [2, 4, 6, 7]),
    ],
)
def test_retention(tmp_path, keep_last, retain, left):
    """--keep-last 2 leaves two and every retained one; the tracked one always stays."""
    _make(tmp_path, *range(1, 8))
    removed = layout.remove_old(tmp_path, keep_last, retain)
    assert layout.complete_iterations(tmp_path) == left
    assert sorted(removed + left) == list(range(1, 8))


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path):
    """After --ckpt-step 2 newer checkpoints exist: the new one is not the newest and must not be deleted."""
    _make(tmp_path, 1, 2, 8, 9)
    _make(tmp_path, 3)
    layout.remove_old(tmp_path, 2, None)
    assert layout.complete_iterations(tmp_path) == [2, 3, 8, 9]


def test_dead_saves_are_cleaned_up(tmp_path):
    """What a killed save leaves is no checkpoint and goes at the next save; a half-replaced one comes back."""
    _make(tmp_path, 1)
    layout.begin(tmp_path, 2)
    assert layout.complete_iterations(tmp_path) == [1]
    (tmp_path / "iter_0000001").rename(tmp_path / ".replaced_iter_0000001")
    assert layout.find_checkpoint(tmp_path, None) == (tmp_path / ".replaced_iter_0000001", 1)
    layout.begin(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".saving_iter_0000003", "iter_0000001", layout.TRACKER]
