# SPDX-License-Identifier: Apache-2.0
"""Rows of a low-latency dispatch in blocks by expert, with what travels beside each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft import Exchange, Plan

Tensor = torch.Tensor


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
    exchange: Exchange,
    routes: Tensor,
    rows: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    num_max: int,
) -> tuple[Plan, Blocks]:
    """Collective. rows [T, H], scales [T, S] of four bytes, routes and float32 weights [T, K]."""
    first = exchange.rank * num_max
    sources = torch.arange(first, first + rows.size(0), dtype=torch.int32, device=rows.device)
    beside = sources.unsqueeze(1)
    if scales is not None:
        beside = torch.cat([scales.view(torch.int32), beside], dim=1)
    stride = exchange.num_ranks * num_max
    plan, out = exchange.plan_and_dispatch(
        routes, rows, weights, beside, layout="expert_strided", expert_stride=stride
    )
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
