# SPDX-License-Identifier: Apache-2.0
"""How rows come back to their tokens when `EPBuffer` sums them in an order of its own, for
buffer.py.

A plan's combine sums a token's rows by ascending rank. Here the order is another, a bias comes
first, and each stage rounds once. So rows come back one by one, by a second plan, which lists a
token once for each place that one of its rows may return to: a place has one rank's choices, or one
choice. Both plans' rows lie alike on the experts' ranks; back at the tokens they are summed, place
after place."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import Plan

from ..runtime import Call


class Stage:
    """fp32 sums [T, H] of rows that come one after another.

    They begin with `biases`, added to zeros. Without biases the sum of two rows keeps a negative
    zero that both have, as a plain addition does; with `copies_one` a single row does, too.
    """

    def __init__(
        self,
        shape: torch.Size,
        device: torch.device,
        biases: tuple[Tensor, ...] = (),
        copies_one: bool = False,
    ):
        self._has_bias, self._copies_one = bool(biases), copies_one
        begin = 0.0 if biases else -0.0  # -0 + x is x, whatever x is
        self.sums = torch.full(shape, begin, dtype=torch.float32, device=device)
        for bias in biases:
            self.sums += bias
        self._count = torch.zeros((shape[0], 1), dtype=torch.int32, device=device)

    def add(self, rows: Tensor, is_there: Tensor) -> None:
        """Adds rows [T, H] of the tokens where is_there, bool [T, 1]."""
        self.sums += torch.where(is_there, rows, -0.0)
        self._count += is_there

    def rounded(self, dtype: torch.dtype) -> Tensor:
        sums = self.sums
        if not self._has_bias:
            is_short = self._count == 2
            if self._copies_one:
                is_short |= self._count == 1
            sums = torch.where(is_short, sums, sums + 0.0)
        return sums.to(dtype)

    def restart(self, where: Tensor) -> None:
        """Clears sums of tokens where `where`, bool [T, 1]."""
        self.sums = torch.where(where, -0.0, self.sums)
        self._count = torch.where(where, 0, self._count)


class Places(NamedTuple):
    """Places that rows of T tokens return to, D for each token, in the order of the sum."""

    routes: Tensor  # of the second plan: choices [T * D, K], or one choice each
    of_choice: Tensor  # int64 [T, K]
    is_used: Tensor  # bool [T, D]
    ends_domain: Tensor  # bool [T, D]: the next place is another domain's


def places_of_ranks(topk_idx: Tensor, num_local: int, num_ranks: int, per_domain: int) -> Places:
    """Makes a place for each rank of a token: domains of per_domain ranks by their last choices, in
    a domain ranks by their last choices. num_local: experts of a rank."""
    num_tokens, topk = topk_idx.shape
    num_places = min(topk, num_ranks)
    device = topk_idx.device
    choice = torch.arange(topk, device=device)
    is_valid = topk_idx >= 0
    rank = torch.where(is_valid, topk_idx, -num_local).div(num_local, rounding_mode="floor")
    last = _last_equal(rank, choice)
    last_of_domain = _last_equal(rank.div(per_domain, rounding_mode="floor"), choice)
    is_last = is_valid & (last == choice)
    key = last_of_domain * topk + last
    is_before = is_last.unsqueeze(1) & (key.unsqueeze(1) < key.unsqueeze(2))
    of_choice = torch.where(is_valid, is_before.sum(dim=2), 0)
    place = torch.arange(num_places, device=device).view(1, -1, 1)
    is_here = is_valid.unsqueeze(1) & (of_choice.unsqueeze(1) == place)
    routes = torch.where(is_here, topk_idx.unsqueeze(1), -1).view(num_tokens * num_places, topk)
    is_end = (is_here & (last == last_of_domain).unsqueeze(1)).any(dim=2)
    return Places(routes, of_choice, is_here.any(dim=2), is_end)


def _last_equal(value: Tensor, choice: Tensor) -> Tensor:
    """Returns the row's last choice with the same value, like value [T, K]. choice: 0 to K-1."""
    is_same = value.unsqueeze(1) == value.unsqueeze(2)
    return torch.where(is_same, choice, -1).amax(dim=2)


def places_of_choices(topk_idx: Tensor) -> Places:
    """Makes a place per choice."""
    is_valid = topk_idx >= 0
    order = torch.arange(topk_idx.size(1), device=topk_idx.device).expand_as(topk_idx)
    return Places(topk_idx.reshape(-1, 1), order, is_valid, is_valid)


@dataclasses.dataclass(eq=False, repr=False)
class Returns:
    """The second plan, made with `options`, and the places of its rows. has_domains: sums of a
    domain are rounded, then added up."""

    plan: Plan
    places: Places
    has_domains: bool
    options: dict[str, Any]

    def sums(self, rows: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
        """Sums rows [T * D, H] of combine by the plan into [T, H] of their dtype."""
        num_tokens, num_places = self.places.is_used.shape
        rows = rows.view(num_tokens, num_places, rows.size(1))
        shape = torch.Size((num_tokens, rows.size(2)))
        total = Stage(shape, rows.device, biases)
        part = Stage(shape, rows.device) if self.has_domains else total
        for place in range(num_places):
            part.add(rows[:, place].float(), self.places.is_used[:, place, None])
            if self.has_domains:
                is_end = self.places.ends_domain[:, place, None]
                total.add(part.rounded(rows.dtype).float(), is_end)
                part.restart(is_end)
        return total.rounded(rows.dtype)

    def weights(self, weights: Tensor) -> Tensor:
        """Returns the rows' weights by choice, fp32 [T, K]."""
        of_choice = self.places.of_choice
        if self.plan.topk == 1:  # each choice has a place
            return weights.view(of_choice.shape)
        by_place = weights.view(*self.places.is_used.shape, of_choice.size(1))
        return by_place.gather(1, of_choice.unsqueeze(1)).squeeze(1)


def plan_returns(call: Call, places: Places, has_domains: bool, **options: Any) -> Returns:
    """Plans returns; collective, on the call's exchange. options: the plan's."""
    call.options = options
    plan = call.exchange.plan(places.routes.contiguous(), **options)
    return Returns(plan, places, has_domains, options)
