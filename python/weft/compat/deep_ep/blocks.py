# SPDX-License-Identifier: Apache-2.0
"""Results of a low-latency dispatch: a block of rows for each expert, as its format has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft import Exchange, Plan, _core, block_formats
from weft.outputs import SkippedPlan


class Blocks(NamedTuple):
    """El blocks of R * num_max rows."""

    rows: Tensor  # [El, R * num_max, H], of NVFP4 [El, R * num_max, H / 2]
    # [El, R * num_max, S], the last two dimensions column-major; of NVFP4 in tiles
    scales: Tensor | None
    weights: Tensor | None  # float32 [El, R * num_max]
    sources: Tensor  # int32 [El, R * num_max, 2]: rank and token; undefined behind the last row
    counts: Tensor  # int32 [El]

    @property
    def is_nvfp4(self) -> bool:
        return self.rows.dtype == torch.uint8

    def parts(self) -> tuple[Tensor, ...]:
        """Rows and scales as callers get them; () if there are no scales."""
        if self.scales is None:
            return ()
        if not self.is_nvfp4:
            return self.rows, self.scales
        # as_tiles(scales).permute(3, 4, 1, 5, 2, 0), by one operator.
        blocks, rows, cols = self.scales.shape
        tiles, words = rows // block_formats.TILE_ROWS, cols // 4
        sizes = (32, 4, tiles, 4, words, blocks)
        strides = (16, 4, 512 * words, 1, 512, 512 * words * tiles)
        return self.rows.permute(1, 2, 0), self.scales.as_strided(sizes, strides)

    def in_order(self, order: Tensor) -> Blocks:
        """Reorders blocks by order int64 [El, R * num_max]: row j becomes order[i, j]."""
        blocks = torch.arange(order.size(0), device=order.device).unsqueeze(1)
        rows = self.rows.view(torch.uint8)[blocks, order].view(self.rows.dtype)
        scales = self.scales
        if self.is_nvfp4:
            tiles = block_formats.as_tiles(scales.view(torch.uint8))
            each = block_formats.from_tiles(tiles, order.size(1))[blocks, order]
            scales = block_formats.in_tiles(each).view(scales.dtype).view(scales.shape)
        elif scales is not None:
            scales = _by_column(scales[blocks, order])
        weights = None if self.weights is None else self.weights[blocks, order]
        return Blocks(rows, scales, weights, self.sources[blocks, order], self.counts)


def _by_column(scales: Tensor) -> Tensor:
    """Copies [El, rows, S], last two dimensions column-major."""
    return scales.transpose(1, 2).contiguous().transpose(1, 2)


def dispatch_blocks(
    exchange: Exchange,
    options: _core.Options,
    topk_idx: Tensor,
    x: Tensor,
    weights: Tensor | None,
    stats: Tensor | None,
    global_scale: Tensor | None,
    receives_later: bool = False,
    is_skipped: bool = False,
) -> tuple[Plan | SkippedPlan, Blocks]:
    """Collective. Calls `Exchange.dispatch_blocks` and adds the counts to stats int32 [El], which
    is contiguous with receives_later."""
    is_summed = stats is not None and stats.is_contiguous()
    plan, outputs = exchange.dispatch_blocks(
        options,
        topk_idx,
        x,
        weights,
        count_sums=stats if is_summed else None,
        global_scale=global_scale,
        receives_later=receives_later,
        is_skipped=is_skipped,
    )
    blocks = as_blocks(outputs)
    if stats is not None and not is_summed:
        stats += blocks.counts
    return plan, blocks


def as_blocks(outputs: tuple[Tensor | None, ...]) -> Blocks:
    """Returns as `Blocks` what `Exchange.dispatch_blocks` returns beside the plan."""
    rows, weights, scales, _, sources, counts = outputs
    if scales is not None and scales.dtype == torch.uint8:  # exponents of NVFP4
        scales = scales.view(torch.int8)
    return Blocks(rows, scales, weights, sources, counts)


def put_back(rows: Tensor, order: Tensor, is_row: Tensor) -> Tensor:
    """Reverses `Blocks.in_order`; rows without `is_row` become zero."""
    blocks = torch.arange(order.size(0), device=order.device).unsqueeze(1)
    back = torch.empty_like(rows)
    back[blocks, order] = rows.masked_fill(~is_row.unsqueeze(2), 0)
    return back
