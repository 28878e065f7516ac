"""One of several ranks: trains one tiny model after another and prints what each printed, as JSON.

python -m tests.training.rank_runs RANK WORLD_SIZE PORT WORDS [WORDS ...]
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings

import torch

from megatron.training.launch import Ranks
from megatron.training.training import pretrain
from tests.training.runs import settings


def main() -> None:
    """Run each command line on this rank; a new port for each, since each starts a job of its own."""
    rank, world_size, port = (int(word) for word in sys.argv[1:4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outputs = []
    for number, words in enumerate(sys.argv[4:]):
        ranks = Ranks(rank, world_size, rank, world_size, "127.0.0.1", port + number, "torchrun")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            pretrain(settings(words, "", world_size=world_size), ranks)
        outputs.append(output.getvalue())
    print(json.dumps(outputs))


if __name__ == "__main__":
    main()
