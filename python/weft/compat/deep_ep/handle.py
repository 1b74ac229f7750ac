# SPDX-License-Identifier: Apache-2.0
"""What `Buffer.dispatch` returns for combine, and for dispatch the same way again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from weft import Plan

from .hybrid_handle import PrivateItem
from .layout import HOST_RANKS

Tensor = torch.Tensor

_ON_ONE_HOST = (
    "rank_prefix_matrix",
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "recv_src_idx",
    "is_token_in_rank",
    "send_head",
)
_ON_SEVERAL_HOSTS = (
    "is_token_in_rank",
    "rdma_channel_prefix_matrix",
    "gbl_channel_prefix_matrix",
    "recv_rdma_channel_prefix_matrix",
    "recv_rdma_rank_prefix_sum",
    "recv_gbl_channel_prefix_matrix",
    "recv_gbl_rank_prefix_sum",
    "recv_src_meta",
    "send_rdma_head",
    "send_nvl_head",
)
_KNOWN = ("rank_prefix_matrix", "is_token_in_rank", "recv_gbl_rank_prefix_sum")


class Handle(Sequence):
    """A plan that reads like the tuple callers know: 6 items, or 10 for more than 8 ranks.

    Items are made when they are asked for; those for the kernels of `deep_ep` alone are
    `PrivateItem`s. Any number of handles may be alive, used in any order and as often as wanted.
    """

    def __init__(self, plan: Plan, is_token_in_rank: Tensor, has_topk: bool) -> None:
        self.plan = plan
        self.is_token_in_rank = is_token_in_rank
        self.has_topk = has_topk  # the plan's routes are the caller's top-k, slot for slot
        is_one_host = plan.exchange.num_ranks <= HOST_RANKS
        self._items = _ON_ONE_HOST if is_one_host else _ON_SEVERAL_HOSTS

    @property
    def rank_prefix_matrix(self) -> Tensor:
        """int32 [R, R]: entry [i, j] counts the rows that rank j receives from ranks 0 to i.

        A rank knows its own column; the others are -1.
        """
        exchange = self.plan.exchange
        matrix = torch.full((exchange.num_ranks, exchange.num_ranks), -1, dtype=torch.int32)
        matrix[:, exchange.rank] = self._rows_up_to_rank()
        return matrix.to(exchange.device)

    @property
    def recv_gbl_rank_prefix_sum(self) -> Tensor:
        """int32 [R]: rows received from ranks 0 to i."""
        return self._rows_up_to_rank().to(self.plan.exchange.device)

    def _rows_up_to_rank(self) -> Tensor:
        return torch.tensor(list(accumulate(self.plan.received_arrivals)), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self._item(name) for name in self._items[index])
        return self._item(self._items[index])

    def _item(self, name: str) -> Any:
        return getattr(self, name) if name in _KNOWN else PrivateItem(name)

    def __repr__(self) -> str:
        return f"<Handle of {len(self)} items: {self.plan!r}>"
