# SPDX-License-Identifier: Apache-2.0
"""Ranks that the low-latency calls of a buffer leave out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.errors import Unsupported

from .checks import NotInWeft
from .layout import routes_of


class RankMask:
    """Ranks that low-latency calls leave out.

    Lost ranks make no calls, and exchanges and CUDA graphs do without them. Other masked ranks
    still make calls, and the mask keeps their tokens, counts and sums out. The mask is the host's,
    so a graph keeps that of its capture.
    """

    renumbers = False  # whether a call has other numbers for experts than its caller
    ranks: tuple[int, ...] | None = None  # those of calls, in their order; None: all

    def __init__(self, num_ranks: int) -> None:
        self.is_masked = torch.zeros(num_ranks + 1, dtype=torch.bool, device="cpu")
        self.is_masked[-1] = True  # no rank
        self.has_any = False  # any rank is masked and not lost
        self._lost: set[int] = set()
        self._call: tuple[frozenset[int], CallRanks] | None = None  # the last of `ranks`, by masks

    def come(self, ranks: tuple[int, ...]) -> None:
        """Makes `ranks` those of all calls, from the first on; others are lost."""
        absent = set(range(len(self.is_masked) - 1)).difference(ranks)
        self.lose(absent)
        self.ranks, self.renumbers = ranks, True

    def lose(self, places: Iterable[int]) -> None:
        """Masks ranks that are lost, given by their numbers in calls."""
        for place in places:
            rank = place if self.ranks is None else self.ranks[place]
            self._lost.add(rank)
            self.is_masked[rank] = True
        self._count()

    def place_of(self, rank: int) -> int:
        """Returns a calling rank's number in calls."""
        return rank if self.ranks is None else self.ranks.index(rank)

    def is_in_calls(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def numbers(self, places: Tensor) -> Tensor:
        """Turns numbers in calls, of any shape (the number of ranks: none), into the caller's
        ranks (R: none)."""
        if self.ranks is None:
            return places
        return torch.tensor([*self.ranks, len(self.is_masked) - 1], device=places.device)[places]

    def set(self, rank: int, is_masked: bool) -> None:
        """Masks or unmasks a rank; Unsupported to unmask a lost one."""
        if not is_masked and rank in self._lost:
            raise Unsupported(f"rank {rank} is lost and cannot be taken in again", "unsupported")
        self.is_masked[rank] = is_masked
        self._count()

    def clear(self) -> None:
        """Unmasks all; Unsupported if any is lost."""
        for rank in range(len(self.is_masked) - 1):
            self.set(rank, False)

    def _count(self) -> None:
        self.has_any = int(self.is_masked.sum()) - 1 > len(self._lost)

    def of(self, places: Tensor) -> Tensor:
        """bool like places (any shape; as many as there are ranks: none): where they are masked."""
        return self.is_masked.to(places.device)[self.numbers(places)]

    def routes(self, topk_idx: Tensor, num_experts: int, num_local_experts: int) -> Tensor:
        """Returns topk_idx [T, K] by the call's expert numbers, -1 for masked ranks' and none."""
        if self.ranks is not None:
            masked = frozenset(self.is_masked[:-1].nonzero().flatten().tolist()) - self._lost
            if self._call is None or self._call[0] != masked:
                self._call = masked, CallRanks(self.ranks, masked, masked)
            return self._call[1].routes(topk_idx, num_experts, num_local_experts)
        if not self.has_any:
            return topk_idx
        routes = routes_of(topk_idx, num_experts)
        return routes.masked_fill(self.of(routes.clamp(min=0).long() // num_local_experts), -1)

    def waits(self, sums: Tensor | None) -> Tensor | None:
        """Returns the part of `sums` for the ranks of the call."""
        return sums if self.ranks is None else CallRanks(self.ranks, _NONE, _NONE).waits(sums)


_NONE: frozenset[int] = frozenset()


class CallRanks:
    """The ranks of a low-latency call, numbered there in ascending order; serves as its mask
    (`RankMask`), as an expert of any other rank is no choice."""

    has_any = False  # nothing comes from other ranks

    def __init__(
        self, ranks: tuple[int, ...], without: frozenset[int], masked: frozenset[int] | set[int]
    ) -> None:
        """without: those of the ranks that are masked since, which a combine skips. masked: those
        of the buffer, as they change."""
        self.ranks = ranks
        self._masked = masked
        self._places = {rank: i for i, rank in enumerate(ranks) if rank not in without}
        self.renumbers = self._places != {i: i for i in range(len(ranks))}
        self._tables: dict[tuple, Tensor] = {}

    def of(self, places: Tensor) -> Tensor:
        """bool like places (any shape; as many as there are ranks: none): where they are masked."""
        is_masked = [*(rank in self._masked for rank in self.ranks), True]
        return torch.tensor(is_masked, device=places.device)[places]

    def routes(self, topk_idx: Tensor, num_experts: int, num_local_experts: int) -> Tensor:
        """Returns topk_idx [T, K] by the call's expert numbers; unknown experts stay none."""
        del num_experts
        if not self.renumbers:
            return topk_idx
        key = (topk_idx.device, topk_idx.dtype, num_local_experts)
        if key not in self._tables:
            cpu = {"dtype": topk_idx.dtype, "device": "cpu"}
            table = torch.full((self.ranks[-1] + 1, num_local_experts), -1, **cpu)
            for rank, place in self._places.items():
                first = place * num_local_experts
                table[rank] = torch.arange(first, first + num_local_experts, **cpu)
            ends = torch.full((1,), -1, **cpu)
            self._tables[key] = torch.cat([ends, table.flatten(), ends]).to(topk_idx.device)
        table = self._tables[key]
        return table[(topk_idx + 1).clamp(0, len(table) - 1)]

    def waits(self, sums: Tensor | None) -> Tensor | None:
        """Returns the part of `sums` for these ranks."""
        if sums is None or not isinstance(sums, Tensor):
            return sums
        if self.ranks != tuple(range(len(self.ranks))):
            raise NotInWeft(f"statistics of waits of ranks {list(self.ranks)} (expected the first)")
        return sums[: len(self.ranks)]
