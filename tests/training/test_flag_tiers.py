"""Every flag that Megatron's users pass is accepted with a meaning or an answer, or refused with advice."""

from __future__ import annotations

import pytest

from megatron.training.arguments import build_config
from megatron.training.flags import flags_by_name
from megatron.training.flags_accepted import MAPPED, NO_EFFECT, NOT_YET, ONLY
from tests.training.flag_cases import BASE, DATA, SAMPLES, TIER_1, TIER_2, TIER_3


def cases(table: str) -> list:
    lines = [line for line in table.strip().splitlines() if line]
    return [pytest.param(*line.split(" -> "), id=line.removeprefix("! ").split()[0]) for line in lines]


def build_case(typed: str):
    words = typed.removeprefix("!").replace("|", " ")
    base = f"{SAMPLES} {DATA}" if typed.startswith("!") else BASE
    if "--patch-tokenizer-type" in typed:
        base = SAMPLES
    return build_config(
        f"{base} {words}".split(), world_size=4, read_checkpoint_args=lambda checkpoint: {"num_layers": 4}
    )


@pytest.mark.parametrize(("typed", "expected"), [*cases(TIER_1), *cases(TIER_2)])
def test_flag_is_accepted_and_means_something(typed, expected):
    """Each flag of the two accepted tiers sets its field, or is answered in the numbered list."""
    config = build_case(typed)
    flag = typed.removeprefix("!").split()[0]
    if expected == "note":
        assert [note for note in config.notes if note.startswith(flag) and "accepted, no effect because" in note]
    else:
        path, value = expected.split("=", 1)
        section, field = path.split(".")
        assert getattr(getattr(config, section), field) == eval(value)  # noqa: S307 - literals of this file
        notes = [note for note in config.notes if note.startswith(f"{flag}: accepted, no effect")]
        assert bool(notes) == (field in NOT_YET)


def test_tables_hold_every_flag_once():
    """The tables above have no double lines and name only flags that exist."""
    flags = [line.removeprefix("! ").split()[0] for line in (TIER_1 + TIER_2).strip().splitlines() if line]
    assert len(flags) == len(set(flags)) >= 196
    assert set(flags) <= {*flags_by_name(), *MAPPED, *NO_EFFECT, *ONLY}


@pytest.mark.parametrize(("typed", "reason"), TIER_3.items(), ids=[key.split()[0] for key in TIER_3])
def test_refused_flag_says_what_to_do(typed, reason):
    """Flags that are not built, and dead ones, stop the run with one sentence."""
    with pytest.raises(ValueError) as caught:
        build_config(f"{BASE} {typed}".split(), world_size=2)
    assert str(caught.value) == f"{typed.split()[0]} is refused, {reason}"
