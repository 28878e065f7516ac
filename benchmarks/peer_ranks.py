"""A system of `benchmarks.peers` on several GPUs of one host, data-parallel; each rank prints its RESULT line.

torchrun --nproc_per_node 2 -m benchmarks.peer_ranks ds_z2 [options of benchmarks.peers]
"""

from __future__ import annotations

import os
import sys
from unittest import mock

import torch

from benchmarks import peers

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> int:
    launched = {name: os.environ[name] for name in _LAUNCHED}
    prepare = peers.prepare_process

    def prepare_rank(threads: int) -> None:
        """What `peers` does for one process, with this rank's place and its share of the threads."""
        prepare(max(1, threads // int(launched["LOCAL_WORLD_SIZE"])))
        os.environ.update(launched)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(launched["LOCAL_RANK"]))

    with mock.patch.object(peers, "prepare_process", prepare_rank):
        return peers.main()


if __name__ == "__main__":
    sys.exit(main())
