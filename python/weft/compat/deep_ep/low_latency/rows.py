# SPDX-License-Identifier: Apache-2.0
"""What `Buffer.low_latency_dispatch` returns, which is blocks of rows by expert and the handle, and
the mask of the ranks that it leaves out. calls.py has the calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft import Plan

from ..checks import Call
from ..handles import PlanHandle


class Blocks(NamedTuple):
    """El blocks of R * num_max rows."""

    rows: Tensor  # [El, R * num_max, H]
    beside: Tensor  # int32 [El, R * num_max, S + 1]: scales, then the source
    weights: Tensor | None  # float32 [El, R * num_max]

    @property
    def sources(self) -> Tensor:
        """int32 [El, R * num_max]: rank * num_max + token; undefined behind the last row."""
        return self.beside[..., -1]

    def scales(self, dtype: torch.dtype) -> Tensor:
        """[El, R * num_max, S] of `dtype` (four bytes); the last two dimensions column-major."""
        by_column = self.beside[..., :-1].transpose(1, 2).contiguous()
        return by_column.view(dtype).transpose(1, 2)

    def in_order(self, order: Tensor) -> Blocks:
        """Row j of block i is row order[i, j] of it; order int64 [El, R * num_max]."""
        blocks = torch.arange(order.size(0), device=order.device).unsqueeze(1)
        rows = self.rows.view(torch.uint8)[blocks, order].view(self.rows.dtype)
        weights = None if self.weights is None else self.weights[blocks, order]
        return Blocks(rows, self.beside[blocks, order], weights)


def dispatch_blocks(
    call: Call,
    routes: Tensor,
    rows: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    num_max: int,
) -> tuple[Plan, Blocks]:
    """Collective. rows [T, H], scales [T, S] of four bytes, routes and float32 weights [T, K]."""
    exchange = call.exchange
    first = exchange.rank * num_max
    sources = torch.arange(first, first + rows.size(0), dtype=torch.int32, device=rows.device)
    beside = sources.unsqueeze(1)
    if scales is not None:
        beside = torch.cat([scales.view(torch.int32), beside], dim=1)
    stride = exchange.num_ranks * num_max
    plan, out = exchange.plan_and_dispatch(routes, rows, weights, beside, **call.options)
    blocks = (plan.num_local_experts, stride)
    return plan, Blocks(
        out.rows.view(*blocks, rows.size(1)),
        out.scales.view(*blocks, beside.size(1)),
        None if out.weights is None else out.weights.view(blocks),
    )


def put_back(rows: Tensor, order: Tensor, is_row: Tensor) -> Tensor:
    """The reverse of `Blocks.in_order`; rows without `is_row` become zero."""
    blocks = torch.arange(order.size(0), device=order.device).unsqueeze(1)
    back = torch.empty_like(rows)
    back[blocks, order] = rows.masked_fill(~is_row.unsqueeze(2), 0)
    return back


class LowLatencyHandle(PlanHandle):
    """(src_info, layout_range, num_max, H, E) as callers know it, around a plan.

    src_info int32 [El, R * num_max]: each row's token on its source; -1 behind the last row.
    layout_range int64 [El, R]: where the rows of each source lie in the expert's block: how many in
    the low 32 bits, the first in the high ones. Both are made when they are asked for, which with a
    receive hook must be after it ran.
    """

    maker = "low_latency_dispatch's"
    items = ("src_info", "layout_range", "num_max", "hidden", "num_experts")

    def __init__(self, plan: Plan, sources: Tensor, num_max: int) -> None:
        """sources int32 [El, R * num_max]: rank * num_max + token, of plan.rows_per_expert rows."""
        super().__init__(plan)
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


class RankMask:
    """Ranks that low-latency calls leave out.

    A masked rank must still make its calls, for Weft does not exchange without one of its ranks: a
    dead one makes the others raise. A mask keeps that rank's tokens, counts and sums out. The host
    knows it, so a CUDA graph keeps the mask of its capture.
    """

    def __init__(self, num_ranks: int) -> None:
        self.is_masked = [False] * num_ranks

    def __bool__(self) -> bool:
        return any(self.is_masked)

    def status(self) -> Tensor:
        """int32 [R], 1 for a masked rank."""
        return torch.tensor(self.is_masked, dtype=torch.int32)

    def without_routes(self, routes: Tensor, num_local_experts: int) -> Tensor:
        """routes [T, K] less those to masked ranks; -1 is none."""
        is_masked = self.status().bool().to(routes.device)
        owner = routes.clamp(min=0).long() // num_local_experts
        return routes.masked_fill(is_masked[owner], -1)

    def is_kept(self, source_rank: Tensor) -> Tensor:
        """Where source_rank (any shape; R stands for none) is not masked."""
        is_masked = torch.cat([self.status().bool(), torch.ones(1, dtype=torch.bool)])
        return ~is_masked.to(source_rank.device)[source_rank]
