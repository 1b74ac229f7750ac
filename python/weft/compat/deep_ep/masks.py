# SPDX-License-Identifier: Apache-2.0
"""Which ranks the low-latency calls of a buffer leave out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.errors import Unsupported

from .layout import routes_of


class RankMask:
    """Ranks that low-latency calls leave out.

    Those that are lost make no calls, and the exchanges do without them, as do CUDA graphs. Others
    still make theirs, and the mask keeps their tokens, counts and sums out. The host knows that, so
    a graph keeps the mask of its capture.
    """

    renumbers = False  # whether a call has other numbers for experts than its caller

    def __init__(self, num_ranks: int) -> None:
        self.is_masked = torch.zeros(num_ranks + 1, dtype=torch.bool, device="cpu")
        self.is_masked[-1] = True  # no rank
        self.has_any = False  # any rank is masked and not lost
        self._lost: set[int] = set()

    def lose(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._lost.add(rank)
            self.is_masked[rank] = True
        self._count()

    def set(self, rank: int, is_masked: bool) -> None:
        """Raises Unsupported for one that is lost and shall be taken in."""
        if not is_masked and rank in self._lost:
            raise Unsupported(f"rank {rank} is lost and cannot be taken in again", "unsupported")
        self.is_masked[rank] = is_masked
        self._count()

    def clear(self) -> None:
        """Raises Unsupported if some are lost."""
        for rank in range(len(self.is_masked) - 1):
            self.set(rank, False)

    def _count(self) -> None:
        self.has_any = int(self.is_masked.sum()) - 1 > len(self._lost)

    def of(self, ranks: Tensor) -> Tensor:
        """bool like ranks (any shape; R stands for none): where they are masked."""
        return self.is_masked.to(ranks.device)[ranks]

    def routes(self, topk_idx: Tensor, num_experts: int, num_local_experts: int) -> Tensor:
        """topk_idx [T, K] less those to masked ranks; -1 is none."""
        if not self.has_any:
            return topk_idx
        routes = routes_of(topk_idx, num_experts)
        return routes.masked_fill(self.of(routes.clamp(min=0).long() // num_local_experts), -1)

    def waits(self, sums: Tensor | None) -> Tensor | None:
        """Of statistics of waits the part for the ranks of the call."""
        return sums
