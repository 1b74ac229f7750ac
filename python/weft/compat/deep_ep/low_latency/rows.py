# SPDX-License-Identifier: Apache-2.0
"""What `Buffer.low_latency_dispatch` returns for combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import Plan

Tensor = torch.Tensor


class LowLatencyHandle(Sequence):
    """(src_info, layout_range, num_max, H, E) as callers know it, around a plan.

    src_info int32 [El, R * num_max]: each row's token on its source; -1 behind the last row.
    layout_range int64 [El, R]: where the rows of each source lie in the expert's block: how many in
    the low 32 bits, the first in the high ones. Both are made when they are asked for, which with a
    receive hook must be after it ran.
    """

    _items = ("src_info", "layout_range", "num_max", "hidden", "num_experts")

    def __init__(self, plan: Plan, sources: Tensor, num_max: int) -> None:
        """sources int32 [El, R * num_max]: rank * num_max + token, of plan.rows_per_expert rows."""
        self.plan = plan
        self.num_max = num_max
        self.hidden = plan.exchange.hidden
        self.num_experts = plan.num_experts
        self.count = plan.rows_per_expert  # int64 [El]
        self.order: Tensor | None = None  # int64 [El, R * num_max] where each row was before `keep`
        self.combine_rows: Tensor | None = None  # for zero_copy
        self._sources = sources

    def keep(self, is_kept: Tensor) -> Tensor:
        """Moves the rows with `is_kept` (bool [El, R * num_max]) to the front of their blocks.

        Returns the order, for everything else that belongs to the rows.
        """
        is_kept = is_kept & self.is_row
        self.order = (~is_kept).to(torch.uint8).argsort(dim=1, stable=True)
        self.count = is_kept.sum(1)
        self._sources = self._sources.gather(1, self.order)
        return self.order

    @property
    def shape(self) -> list[int]:
        """[El, R * num_max, H] of the rows."""
        return [*self._sources.shape, self.hidden]

    @property
    def is_row(self) -> Tensor:
        """bool [El, R * num_max]: False behind the last row of a block."""
        slots = torch.arange(self._sources.size(1), device=self._sources.device)
        return slots < self.count.unsqueeze(1)

    @property
    def source_rank(self) -> Tensor:
        """int64 [El, R * num_max]: R behind the last row."""
        ranks = self._sources.long() // self.num_max
        return torch.where(self.is_row, ranks, self.plan.exchange.num_ranks)

    @property
    def src_info(self) -> Tensor:
        return torch.where(self.is_row, self._sources % self.num_max, -1)

    @property
    def layout_range(self) -> Tensor:
        num_ranks = self.plan.exchange.num_ranks
        ranks = self.source_rank
        counts = ranks.new_zeros((ranks.size(0), num_ranks + 1))
        counts = counts.scatter_add_(1, ranks, torch.ones_like(ranks))[:, :num_ranks]
        return (counts.cumsum(1) - counts) << 32 | counts

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(getattr(self, name) for name in self._items[index])
        return getattr(self, self._items[index])

    def __repr__(self) -> str:
        return f"<LowLatencyHandle, at most {self.num_max} tokens of a rank: {self.plan!r}>"
