# SPDX-License-Identifier: Apache-2.0
"""What `Buffer.dispatch` returns for combine, and for dispatch the same way again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from weft import Plan

Tensor = torch.Tensor


class Handle(Sequence):
    """A plan that reads like the tuple callers know: item i is the attribute `items[i]`.

    Items are made when they are asked for; those about what arrives copy the plan to the host, and
    wait for a GPU. Any number of handles may be alive, used in any order and as often as wanted.
    T: tokens of this rank, N: rows it received, R: ranks, C: channels of the configuration.

    Weft has no channels. Items by channel count as if the first channel moved everything: each
    column holds the total.
    """

    items: tuple[str, ...] = ()

    def __init__(
        self, plan: Plan, is_token_in_rank: Tensor, has_topk: bool, num_channels: int
    ) -> None:
        self.plan = plan
        self.is_token_in_rank = is_token_in_rank
        self.has_topk = has_topk  # the plan's routes are the caller's top-k, slot for slot
        self._num_channels = num_channels

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(getattr(self, name) for name in self.items[index])
        return getattr(self, self.items[index])

    def __repr__(self) -> str:
        return f"<Handle of {len(self)} items: {self.plan!r}>"

    @property
    def device(self) -> torch.device:
        return self.plan.exchange.device

    def rows_of_ranks(self) -> Tensor:
        """int32 [R]: rows from each rank."""
        return torch.tensor(self.plan.received_arrivals, dtype=torch.int32, device=self.device)

    def by_channel(self, counts: Tensor) -> Tensor:
        """int32 [any, C] of counts [any]."""
        return counts.to(torch.int32).unsqueeze(1).repeat(1, self._num_channels)


class OneHostHandle(Handle):
    """6 items: the ranks are on one host."""

    items = (
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "recv_src_idx",
        "is_token_in_rank",
        "send_head",
    )

    @property
    def rank_prefix_matrix(self) -> Tensor:
        """int32 [R, R]: entry [i, j] counts the rows that rank j receives from ranks 0 to i.

        A rank knows its own column; the others are -1.
        """
        num_ranks = self.plan.exchange.num_ranks
        matrix = torch.full((num_ranks, num_ranks), -1, dtype=torch.int32, device=self.device)
        matrix[:, self.plan.exchange.rank] = self.rows_of_ranks().cumsum(0)
        return matrix

    @property
    def channel_prefix_matrix(self) -> Tensor:
        """int32 [R, C]: tokens that go to each rank."""
        return self.by_channel(self.is_token_in_rank.sum(0))

    @property
    def recv_channel_prefix_matrix(self) -> Tensor:
        """int32 [R, C]: rows from each rank."""
        return self.by_channel(self.rows_of_ranks())

    @property
    def recv_src_idx(self) -> Tensor:
        """int32 [N]: the number that each row's token has at its source; -1 beyond the last."""
        pairs = json.loads(self.plan.core.to_json())["received"]
        tokens = [token for pair in pairs for token in pair["token"]]
        tokens += [-1] * (self.plan.num_rows - len(tokens))
        return torch.tensor(tokens, dtype=torch.int32, device=self.device)

    @property
    def send_head(self) -> Tensor:
        """int32 [T, R]: the place of each token among those that go to the rank, or -1."""
        return places(self.is_token_in_rank)


def places(is_member: Tensor) -> Tensor:
    """int32 like bool [T, any]: the place of each True in its column, -1 where False."""
    place = is_member.cumsum(0) - 1
    return torch.where(is_member, place, -1).to(torch.int32)
