"""Ranks that do not come are named, and nobody waits longer than the time limit."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from megatron.training import rendezvous
from megatron.training.launch import Ranks
from tests.training.test_two_ranks import free_ports

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def job(monkeypatch):
    """Ranks 0 to 2 of a job that should meet at a free port; reports come at once."""
    monkeypatch.setattr(rendezvous, "FIRST_REPORT_SECONDS", 0.2)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_ports(1)
    return [Ranks(rank, 3, rank, 3, "127.0.0.1", port, "torchrun") for rank in range(3)]


def test_single_process_needs_no_port():
    """A job of one meets itself without a socket."""
    alone = Ranks(0, 1, 0, 1, "127.0.0.1", 0, "single")
    assert rendezvous.connect(alone, timedelta(seconds=1), print).check(["x"]) is False


def test_first_rank_names_who_is_missing(job):
    """Rank 0 alone reports both missing ranks and gives up after the limit with their names."""
    lines = []
    with pytest.raises(RuntimeError, match=r"2 ranks \(1, 2\) of 3 did not join within 2 s"):
        rendezvous.connect(job[0], timedelta(seconds=2), lines.append)
    assert lines == ["waiting for 2 ranks (1, 2) of 3 to join"]


def test_other_rank_names_the_first(job):
    """A rank without rank 0 says where it waits and gives up after the limit."""
    lines = []
    with pytest.raises(RuntimeError, match=f"rank 1 cannot use 127.0.0.1:{job[0].master_port} to meet rank 0"):
        # torch's client waits up to about 3 s between its own tries, and only then says that one failed.
        rendezvous.connect(job[1], timedelta(seconds=8), lines.append)
    assert f"rank 1 waits for rank 0 at 127.0.0.1:{job[0].master_port}" in lines


def test_all_meet(job):
    """Ranks that all come, the first one last, get a store that they share."""
    stores = [None, None, None]

    def join(rank):
        stores[rank] = rendezvous.connect(job[rank], timedelta(seconds=60), lambda line: None)

    threads = [threading.Thread(target=join, args=[rank]) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    stores[0].set("word", "hello")
    assert stores[2].get("word") == b"hello"
