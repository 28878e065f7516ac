"""The table of the update phase: medians of repeated rows, errors of predictions, the choice beside the best share."""

from benchmarks.update_phase import Measured, Row, Setting, cover, cover_table

MILLION = 10**6


def row(setting: Setting, update: float, steady: float, predicted: float) -> Row:
    return Row(setting, 10 * MILLION, 0.5, Measured(update, steady, 0.01), predicted, "90 % of its bound (dram)")


def test_the_table_sums_up_what_was_measured():
    """Rows of one setting become one line; every run counts in the errors; the choice is compared by steady time."""
    half, three = (Setting("share", 10, MILLION, share=share) for share in ("0.5", "0.75"))
    chosen = Setting("chosen", 10, MILLION)
    rows = [
        row(half, 0.100, 0.125, 0.105),
        row(three, 0.080, 0.100, 0.084),
        row(chosen, 0.090, 0.104, 0.072),
        row(half, 0.200, 0.225, 0.210),
    ]
    lines = cover_table(rows)
    assert lines[2] == "| share 0.5 | 0.50 | 157.5 / 150.0 | 1.050 | 0.06 | 90 % of its bound (dram) |"
    assert lines[-2] == (
        "predictions are off by 5.0 % (median) and 20.0 % (most) over 4 runs; 1 are off by more than 10 %"
    )
    assert lines[-1] == "the best share of the sweep is 0.75; the chosen one takes 1.040 times its steady time"


def test_every_share_is_measured_twice_with_the_others_between():
    """At least 20 settings, all different from the defaults in one way, of the same number of parameters."""
    settings = cover(16, MILLION)
    shares = [Setting("share", 16, MILLION, share=f"{n / 8:g}") for n in range(9)] + [Setting("chosen", 16, MILLION)]
    assert settings[: len(shares)] == shares and settings[-len(shares) :] == shares[::-1]
    assert len(set(settings)) >= 20
    assert {s.num_subgroups * s.numel for s in settings} == {16 * MILLION}
    for setting in settings[len(shares) : -len(shares)]:
        plain = Setting(setting.name, setting.num_subgroups, setting.numel, share=setting.share)
        differing = [name for name in Setting.__slots__ if getattr(setting, name) != getattr(plain, name)]
        assert len(differing) == (setting.numel == MILLION), setting
        assert setting.config.offload_resident_fraction == setting.resident
