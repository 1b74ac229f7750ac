# SPDX-License-Identifier: Apache-2.0
"""Ranks that low-latency calls leave out.

A masked rank must still make its calls, for Weft does not exchange without one of its ranks: a dead
one makes the others raise. A mask keeps that rank's tokens, counts and sums out. The host knows it,
so a CUDA graph keeps the mask of its capture.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import check, check_is


class RankMask:
    """Which ranks are masked here."""

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


class MaskCalls:
    """The part of `Buffer` that masks ranks. It needs enable_shrink=True."""

    group_size: int
    enable_shrink: bool
    _mask: RankMask
    _runtime: Callable[[str], Any]

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local. Masks a rank, or takes it in again."""
        self._check_shrink("low_latency_update_mask_buffer")
        check(
            0 <= rank_to_mask < self.group_size,
            f"low_latency_update_mask_buffer: rank_to_mask = {rank_to_mask} "
            f"(expected 0 to {self.group_size - 1})",
        )
        self._mask.is_masked[rank_to_mask] = mask

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Local. Fills mask_status int32 [R] with 1 for masked ranks, else 0."""
        self._check_shrink("low_latency_query_mask_buffer")
        name = "low_latency_query_mask_buffer: mask_status"
        check_is(name, mask_status, torch.int32, [self.group_size])
        mask_status.copy_(self._mask.status())

    def low_latency_clean_mask_buffer(self) -> None:
        """Local. Takes all ranks in again."""
        self._check_shrink("low_latency_clean_mask_buffer")
        self._mask = RankMask(self.group_size)

    def _check_shrink(self, verb: str) -> None:
        self._runtime(verb)
        check(self.enable_shrink, f"{verb}: enable_shrink is False (the buffer needs it)")
