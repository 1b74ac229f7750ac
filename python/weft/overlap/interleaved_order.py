# SPDX-License-Identifier: Apache-2.0
"""Which micro-batch is in which chunk when, on a rank of a pipeline that holds several chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class VirtualStage(NamedTuple):
    """One micro-batch in one chunk of this rank."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class PipelineShape:
    """Chunk c of rank r is stage c * num_ranks + r of the model."""

    rank: int = 0
    num_ranks: int = 1
    num_chunks: int = 1  # of each rank
    num_micro_batches: int = 1  # a multiple of num_ranks

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that is none."""
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"schedule: rank {self.rank} of a pipeline of {self.num_ranks}")
        if self.num_chunks < 1:
            raise ValueError(f"schedule: {self.num_chunks} chunks (at least 1)")
        if self.num_micro_batches < 1 or self.num_micro_batches % self.num_ranks:
            raise ValueError(
                f"schedule: {self.num_micro_batches} micro-batches in a pipeline of "
                f"{self.num_ranks} ranks (a multiple of them)"
            )

    def is_first(self, chunk: int) -> bool:
        """Whether the model begins in this chunk."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether the model ends in this chunk."""
        return self.rank == self.num_ranks - 1 and chunk == self.num_chunks - 1


def forward_order(shape: PipelineShape) -> list[VirtualStage]:
    """The forwards of every rank: num_ranks micro-batches through one chunk, then the next."""
    return [
        VirtualStage(first + i, chunk)
        for first in range(0, shape.num_micro_batches, shape.num_ranks)
        for chunk in range(shape.num_chunks)
        for i in range(shape.num_ranks)
    ]


def backward_order(shape: PipelineShape) -> list[VirtualStage]:
    """The backwards of every rank: as the forwards, from the last chunk to the first."""
    last = shape.num_chunks - 1
    return [VirtualStage(stage.micro_batch, last - stage.chunk) for stage in forward_order(shape)]


def num_warm_up(shape: PipelineShape) -> int:
    """Forwards before the first backward: one more than without overlap, so that a forward and the
    backward beside it need nothing of each other."""
    until_first_backward = (
        2 * (shape.num_ranks - shape.rank - 1) + (shape.num_chunks - 1) * shape.num_ranks
    )
    return min(until_first_backward + 1, shape.num_micro_batches * shape.num_chunks)
