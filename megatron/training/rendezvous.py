"""How the ranks of a job find each other, and who is named when one does not come."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron.training.launch import Ranks

FIRST_REPORT_SECONDS = 15.0
_REPORT_EVERY_SECONDS = 60.0
_POLL_SECONDS = 0.05


def connect(ranks: Ranks, timeout: timedelta, report: Callable[[str], None]) -> dist.Store:
    """Return the store through which all ranks have met.

    report: called with a line that names who is missing: on rank 0 every rank, on the others rank 0.
    Raises RuntimeError, one sentence, when rank 0 cannot be reached or ranks are still missing after `timeout`.
    """
    if ranks.world_size == 1:
        return dist.HashStore()
    place = f"{ranks.master_addr}:{ranks.master_port}"
    tcp = _reach_first_rank(ranks, timeout, report)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"megatron_training/attempt_{attempt}", tcp)
    store.set(f"joined/{ranks.rank}", socket.gethostname())
    if ranks.is_first:
        _wait_for_all(store, ranks, timeout, report)
        store.set("complete", "1")
    else:
        try:
            store.wait(["complete"], timeout)
        except (RuntimeError, TimeoutError):
            raise RuntimeError(f"rank {ranks.rank} met rank 0 at {place}, but other ranks never came") from None
    return store


def _reach_first_rank(ranks: Ranks, timeout: timedelta, report: Callable[[str], None]) -> dist.TCPStore:
    """Return the store that rank 0 serves, trying until it does."""
    place = f"{ranks.master_addr}:{ranks.master_port}"
    # torchrun's agent already serves a store at the master's port; rank 0 must not open a second one.
    serves = ranks.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + timeout.total_seconds()
    patience = FIRST_REPORT_SECONDS
    while True:
        seconds = max(1.0, min(patience, deadline - time.monotonic()))
        try:
            store = dist.TCPStore(
                ranks.master_addr,
                ranks.master_port,
                ranks.world_size,
                is_master=serves,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,  # we wait ourselves, to be able to name who is missing
                multi_tenant=True,
            )
        except (RuntimeError, TimeoutError) as error:
            if serves or time.monotonic() >= deadline:
                reason = str(error).splitlines()[0]
                raise RuntimeError(f"rank {ranks.rank} cannot use {place} to meet rank 0: {reason}") from None
            report(f"rank {ranks.rank} waits for rank 0 at {place}")
            patience = _REPORT_EVERY_SECONDS
            continue
        store.set_timeout(timeout)
        return store


def _wait_for_all(store: dist.Store, ranks: Ranks, timeout: timedelta, report: Callable[[str], None]) -> None:
    missing = list(range(ranks.world_size))
    start = time.monotonic()
    next_report = start + FIRST_REPORT_SECONDS
    while True:
        missing = [rank for rank in missing if not store.check([f"joined/{rank}"])]
        if not missing:
            return
        now = time.monotonic()
        if now - start > timeout.total_seconds():
            raise RuntimeError(
                f"{_names(missing)} of {ranks.world_size} did not join within {timeout.total_seconds():.0f} s: start "
                "them, or set WORLD_SIZE to the ranks that exist"
            )
        if now > next_report:
            report(f"waiting for {_names(missing)} of {ranks.world_size} to join")
            next_report = now + _REPORT_EVERY_SECONDS
        time.sleep(_POLL_SECONDS)


def _names(missing: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in missing[:16]) + (", ..." if len(missing) > 16 else "")
    return f"rank {shown}" if len(missing) == 1 else f"{len(missing)} ranks ({shown})"
