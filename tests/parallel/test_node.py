"""What a rank may use of its node, whatever the launcher says of it."""

from __future__ import annotations

import os
import time

import pytest


def _place(variables: dict[str, str]) -> tuple[float, int]:
    from deep_offload.optimizer import factory

    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    return factory._place_on_node()


@pytest.mark.parametrize("variables", [{}, {"LOCAL_WORLD_SIZE": "2"}], ids=["not told", "told"])
def test_ranks_of_a_node_are_counted(pools, variables):
    """`srun` without --ntasks-per-node tells no rank how many share its memory and cores: the ranks tell each other."""
    cores = len(os.sched_getaffinity(0))
    assert pools(2).run(_place, variables) == [(cores / 2, 2)] * 2
    assert pools(2).run(_place, {}, ranks=1) == [(cores, 1)]


def _measure(folder: str, late_rank: int) -> tuple[list[float], list[str], int]:
    """When each rate's clock started on this rank, what was logged, and how often the ranks met; `late_rank` comes and
    works late."""
    from unittest import mock

    import torch
    import torch.distributed as dist

    from deep_offload.optimizer import ranks
    from deep_offload.runtime import measure

    starts: list[float] = []
    lines: list[str] = []
    meetings: list[None] = []
    original = measure._rates
    delay = float(dist.get_rank() == late_rank)

    def rates(loops, seconds, meet):
        time.sleep(0.3 * delay)
        return original(loops, seconds, lambda: (meet(), starts.append(time.time())))

    time.sleep(delay)
    with (
        mock.patch.dict(os.environ, {"DEEP_OFFLOAD_CACHE": f"{folder}/{dist.get_rank()}"}),
        mock.patch.object(measure, "_rates", rates),
    ):
        real = ranks.all_ranks()
        together = measure.Together(real.any, lambda: (real.meet(), meetings.append(None)))
        measure.profile_for_run(None, torch.device("cpu"), 1, 2, together=together, log=lines.append)
    return starts, lines, len(meetings)


def test_ranks_measure_the_same_thing_at_the_same_time(pools, tmp_path):
    """Each rate is taken by all ranks at once, though one comes late; one without a profile makes all measure."""
    first, second = pools(2).run(_measure, str(tmp_path), 1)
    assert len(first[0]) == len(second[0]) == 7
    assert first[2] == second[2] == 8  # for the triad as well
    assert max(abs(a - b) for a, b in zip(first[0], second[0])) < 0.5
    for starts, lines, _ in pools(2).run(_measure, str(tmp_path), 0):
        assert not starts and not lines  # both have a profile by now
    (profile,) = (tmp_path / "1").iterdir()
    profile.unlink()
    for starts, lines, _ in pools(2).run(_measure, str(tmp_path), -1):
        assert len(starts) == 7 and "measured this machine" in lines[-1]
