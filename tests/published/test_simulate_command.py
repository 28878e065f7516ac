"""`python -m deep_offload simulate`: questions that no machine here can answer, with their assumptions."""

from __future__ import annotations

import time

import pytest

from deep_offload.cli import main


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))


def run(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(("simulate", *words))
    except SystemExit as ending:
        code = int(ending.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("flags", [(), ("--offload-resident-fraction", "0")], ids=["auto", "more slots tried"])
def test_70b_on_512_gpus(capsys, flags):
    """Layout, lanes, shares, days and every assumption, in seconds."""
    started = time.process_time()
    code, out, _ = run(capsys, "--model", "70b", "--gpus", "512", "--profile", "h100x8", "--tokens", "1e12", *flags)
    assert code == 0 and time.process_time() - started < 10
    for part in ("70.55 B parameters", "ranks: 512", "GPU share", "GPU-hours", "assumptions:", "estimates, not"):
        assert part in out
    assert "collectives between hosts: 45 GB/s a GPU" in out


def test_faster_links_and_memory_are_faster(capsys):
    """Twice the link and twice the memory shorten the update, and the answer says that they are only on paper."""

    def update_ms(*words: str) -> float:
        place = ("--offload-gpu-share", "0.5", "--offload-resident-fraction", "0")
        code, out, _ = run(capsys, "--model", "8b", "--profile", "h200", *place, *words)
        assert code == 0
        return float(out.split("predicted update: ")[1].split(" ms")[0])

    before = update_ms()
    assert update_ms("--scale-link", "2", "--scale-dram", "2") < 0.6 * before
    _, out, _ = run(capsys, "--model", "8b", "--profile", "h200", "--scale-link", "2")
    assert "changed on paper: link x 2" in out and "link 110 GB/s up" in out
    assert "rates are those of no real machine, but made from h200: measured by" in out and "estimates, not" not in out
    _, out, _ = run(capsys, "--model", "8b", "--profile", "h200", "--network-gb-per-s", "40")
    assert "no real machine, but made from h200" in out and "changed on paper: network 40 GB/s a GPU" in out
    _, out, _ = run(capsys, "--model", "8b", "--profile", "h200", "--scale-link", "1")
    assert "  rates of h200: measured by this project" in out and "no real machine" not in out


def test_the_table_may_be_left_out(capsys):
    """--no-alternatives leaves the run, its lanes and the assumptions."""
    words = ("--model", "1b", "--profile", "h200", "--width", "40")
    assert "GPU share  slots" in run(capsys, *words)[1]
    code, out, _ = run(capsys, *words, "--no-alternatives")
    assert code == 0 and "GPU share  slots" not in out and "assumptions:" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scale-link", "0"), "--scale-link is 0.0, allowed are numbers from 0.01 to 100"),
        (("--network-gb-per-s", "-1"), "--network-gb-per-s is -1.0, it must be more than 0"),
        (("--gpus", "0"), "--gpus is '0'"),
        (("--width", "3"), "--width is 3, it must be at least 10"),
    ],
)
def test_nonsense_gets_one_sentence(capsys, words, message):
    """What cannot be is refused with exit code 2 before anything is computed."""
    code, out, err = run(capsys, "--model", "8b", "--profile", "h200", *words)
    assert code == 2 and message in err


def test_what_does_not_fit_says_so(capsys):
    """70B on one GPU: exit code 2, with the assumptions all the same."""
    code, out, _ = run(capsys, "--model", "70b", "--gpus", "1", "--profile", "h200")
    assert code == 2 and "does not fit" in out and "assumptions:" in out
