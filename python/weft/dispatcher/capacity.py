# SPDX-License-Identifier: Apache-2.0
"""Numbers of rows per expert: capacity, padding for quantised products, drop-and-pad."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import size_of
from .config import Settings
from .permute import gather_rows, sum_rows


def get_capacity(
    num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None
) -> int:
    """Is ceil(num_tokens / num_experts * capacity_factor), or `min_capacity`."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """Sets entries of the map [T, E], bool or of zeros and ones, until each column's count is a
    multiple of pad_multiple.

    Takes a column's first clear entries, in row order; a column with too few of them is filled
    as far as it goes. Changes `routing_map` itself and returns it.
    """
    counts = routing_map.sum(0)
    missing = -counts % pad_multiple
    is_clear = routing_map == 0
    routing_map |= is_clear & (is_clear.cumsum(0) <= missing)
    return routing_map


def get_align_size_for_quantization(config: Any) -> int:
    """Returns the row multiple of experts' matrix products; 0: any."""
    c = Settings(config)
    if c.use_transformer_engine_op_fuser or c.moe_use_grouped_tensor:
        return 256
    if c.fp8:
        return 32 if getattr(c.fp8_recipe, "value", c.fp8_recipe) == "mxfp8" else 16
    return 128 if c.fp4 else 0


def skip_routed_expert_padding(config: Any) -> bool:
    """Returns whether rows reach the experts already padded, so that these must not pad again."""
    c = Settings(config)
    if c.moe_router_padding_for_quantization:
        return True
    if c.moe_token_dispatcher_type != "flex":
        return False
    if c.moe_flex_dispatcher_backend in ("hybridep", "ncclep"):
        return True
    return bool(c.moe_use_grouped_tensor and c.moe_permute_fusion)


def limit_to_capacity(routing_map: Tensor, probs: Tensor, capacity: int) -> Tensor:
    """Keeps each expert's first `capacity` entries of the map.

    Also clears entries of probability 0: routers set them to fill an expert up to its capacity,
    which needs no tokens here.
    """
    is_routed = routing_map & (probs.detach() != 0)
    return is_routed & (is_routed.cumsum(0) <= capacity)


class FixedCapacity:
    """Spreads rows that arrive in blocks of any length to equal blocks.

    Zero rows, which no link has to carry, fill the blocks. Nothing waits for a GPU.
    """

    def __init__(self, manager: Any, num_tokens: int) -> None:
        """For at most `num_tokens` tokens on every rank.

        Top-k and experts both count every TP rank, so that the capacity does not depend on TP;
        the reference divides only one of them, which makes it TP times too small.
        """
        self.per_source = get_capacity(  # rows of one expert from one rank
            num_tokens * manager.router_topk, manager.num_experts, manager.capacity_factor
        )
        align, num_local_experts = manager.align_size or 1, manager.num_local_experts
        # Rows of one expert from all ranks, padded.
        self.per_expert = -(-self.per_source * size_of(manager.group) // align) * align
        self.num_rows = self.per_expert * num_local_experts
        self.tokens_per_expert = torch.full((num_local_experts,), self.per_expert, device="cpu")
        self._arrived: Tensor | None = None  # int64 [num_rows]: the arrived row of each, or P
        self._num_arrived = 0

    def spread(self, rows: Tensor, probs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Spreads rows [P, H], probs [P], by int64 counts [El], to [num_rows, H], [num_rows]."""
        self._num_arrived = rows.shape[0]
        counts = counts.to(rows.device, non_blocking=True)
        begin = counts.cumsum(0) - counts
        place = torch.arange(self.per_expert, device=rows.device)
        arrived = begin.unsqueeze(1) + place
        arrived = arrived.masked_fill(place >= counts.unsqueeze(1), self._num_arrived)
        self._arrived = arrived.reshape(-1)
        probs = gather_rows(probs.unsqueeze(1), self._arrived, has_absent=True)
        return gather_rows(rows, self._arrived, has_absent=True), probs.squeeze(1)

    def gather_back(self, rows: Tensor) -> Tensor:
        """Moves rows in equal blocks [num_rows, H] back to their places [P, H]."""
        return sum_rows(rows, self._arrived, self._num_arrived, has_absent=True)
