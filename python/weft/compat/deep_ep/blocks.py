# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch returns: a block of rows for each expert, as its format has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft import Plan, block_formats
from weft.outputs import Beside

from .runtime import Call


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
        tiles = block_formats.as_tiles(self.scales).permute(3, 4, 1, 5, 2, 0)
        return self.rows.permute(1, 2, 0), tiles

    def in_order(self, order: Tensor) -> Blocks:
        """Row j of block i is row order[i, j] of it; order int64 [El, R * num_max]."""
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
    """[El, rows, S] with the last two dimensions column-major."""
    return scales.transpose(1, 2).contiguous().transpose(1, 2)


def dispatch_blocks(
    call: Call,
    x: Tensor,
    routes: Tensor,
    weights: Tensor | None,
    stored: dict[str, str],
    stats: Tensor | None = None,
    global_scale: Tensor | None = None,
    receives_later: bool = False,
) -> tuple[Plan, Blocks]:
    """Collective. x bf16 [T, H] with weights float32 [T, K], if they travel, to routes [T, K].

    stored: how, as options of `plan_and_dispatch`, with global_scale. stats int32 [El]: the counts
    are added to it. receives_later: see `Exchange.plan_and_dispatch`; stats are contiguous then.
    """
    is_summed = stats is not None and stats.is_contiguous()
    plan, out, sources, counts = call.exchange.plan_and_dispatch(
        routes,
        x,
        weights,
        global_scale=global_scale,
        ignores_unknown=True,
        beside=Beside(count_sums=stats) if is_summed else None,
        blocks=True,
        receives_later=receives_later,
        **stored,
        **call.options,
    )
    if stats is not None and not is_summed:
        stats += counts
    scales = out.scales
    if stored.get("quantise") == "nvfp4" and scales.dtype == torch.uint8:
        scales = scales.view(torch.int8)
    return plan, Blocks(out.rows, scales, out.weights, sources, counts)


def stored_as(
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    use_nvfp4: bool,
    use_mxfp8: bool,
    use_ue8m0_for_sf: bool,
) -> dict[str, str]:
    """How rows are stored, as options of `plan_and_dispatch`."""
    if use_nvfp4:
        rule = "ue8m0" if use_ue8m0_for_sf else "exact"
        return {"quantise": "nvfp4", "scale_rule": rule, "scale_layout": "tile"}
    if use_mxfp8:
        return {"quantise": "mxfp8", "scale_layout": "column"}
    if not use_fp8:
        return {}
    rule = "ue8m0" if use_ue8m0 else "power_of_two" if round_scale else "clamped"
    return {"quantise": "e4m3", "scale_rule": rule, "scale_layout": "column"}


def put_back(rows: Tensor, order: Tensor, is_row: Tensor) -> Tensor:
    """The reverse of `Blocks.in_order`; rows without `is_row` become zero."""
    blocks = torch.arange(order.size(0), device=order.device).unsqueeze(1)
    back = torch.empty_like(rows)
    back[blocks, order] = rows.masked_fill(~is_row.unsqueeze(2), 0)
    return back
