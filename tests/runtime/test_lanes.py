"""A lane that cannot begin: its error reaches the training loop, which would otherwise wait for ever."""

import pytest

from deep_offload.plan.ops import Lane, Op, OpKind
from deep_offload.runtime.lanes import HostDevice, LaneBackend, LaneError


class Unreachable(HostDevice):
    """A device that one lane's thread finds gone."""

    def enter(self, lane: Lane) -> None:
        if lane is Lane.H2D:
            raise RuntimeError("no such device")


def test_a_lane_that_cannot_enter_its_device_ends_the_run():
    """The error names operation and lane; what waits for the operation goes on, and closing ends."""
    backend = LaneBackend({OpKind.PREFETCH: lambda _op: 0, OpKind.UPDATE_GPU: lambda _op: 0}, Unreachable())
    done = backend.submit(Op(OpKind.PREFETCH, 0), [])
    backend.submit(Op(OpKind.UPDATE_GPU, 0), [done])
    with pytest.raises(LaneError, match=r"prefetch\[0\] failed on the h2d lane: no such device"):
        backend.synchronize()
    backend.close()
