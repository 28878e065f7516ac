"""Which samples make up the micro-batches of one data-parallel rank. The order does not depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class SequentialBatches:
    """Samples in order, once: rank r of R takes the r-th micro-batch of every R consecutive ones.

    Starts at sample `consumed_samples`; a last group of less than R micro-batches is left out.
    """

    def __init__(
        self, total_samples: int, consumed_samples: int, micro_batch_size: int, data_rank: int, data_size: int
    ) -> None:
        assert 0 <= data_rank < data_size and micro_batch_size > 0
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_rank = data_rank
        self.data_size = data_size

    def __iter__(self) -> Iterator[list[int]]:
        group = self.micro_batch_size * self.data_size
        own = self.data_rank * self.micro_batch_size
        for start in range(self.consumed_samples, self.total_samples - group + 1, group):
            yield list(range(start + own, start + own + self.micro_batch_size))


class ShuffledBatches(SequentialBatches):
    """Samples for ever, each pass in a new order that `seed` and the pass number decide."""

    def __init__(self, *args: int, seed: int) -> None:
        super().__init__(*args)
        self.seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        group = self.micro_batch_size * self.data_size
        own = self.data_rank * self.micro_batch_size
        per_pass = self.total_samples // group * group  # whole groups only, so that passes start alike on all ranks
        assert per_pass > 0, "the caller checks that the data has at least one micro-batch for each rank"
        done = self.consumed_samples
        while True:
            number, start = divmod(done, per_pass)
            generator = torch.Generator().manual_seed(self.seed + number)
            order = torch.randperm(self.total_samples, generator=generator)[:per_pass].tolist()
            for begin in range(start, per_pass, group):
                yield order[begin + own : begin + own + self.micro_batch_size]
            done = (number + 1) * per_pass
