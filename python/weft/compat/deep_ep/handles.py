# SPDX-License-Identifier: Apache-2.0
"""Handles: plans that read like the sequences that callers know: their base, the handle of
`Buffer.dispatch`, for combine and for another dispatch, and the handle of
`low_latency_dispatch`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import Plan

from .checks import check
from .layout import HOST_RANKS, Hosts

if TYPE_CHECKING:
    from .hooks import Hook


class PlanHandle(Sequence):
    """Holds a plan. Item i is the attribute `items[i]`, made on access.

    Any number of handles may be alive, used in any order and as often as wanted.
    """

    items: tuple[str, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self._item(name) for name in self.items[index])
        return self._item(self.items[index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} items: {self.plan!r}>"

    def _item(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def device(self) -> torch.device:
        return self.plan.exchange.device


def on_host(plan: Plan) -> dict[str, Any]:
    """Returns the plan's fields on the host; waits for a GPU's plan."""
    return json.loads(plan.core.to_json())


_ONE_HOST = (
    "rank_prefix_matrix",
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "recv_src_idx",
    "is_token_in_rank",
    "send_head",
)
_SEVERAL_HOSTS = (
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


class Handle(PlanHandle):
    """6 items among ranks of one host, 10 among those of S, as `Hosts` counts them.

    T: tokens of this rank, N: rows it received, R: ranks, C: channels of the configuration.
    is_token_in_rank: the caller's, None if there was none; it is made of the plan then.
    has_topk: the plan's routes are the caller's top-k, slot for slot.
    ids int32 [N, K]: the experts that each row's token goes to, anywhere; None without top-k, and
    among the ranks of one host, where nothing asks for them.
    Items about what arrives copy the plan to the host, and wait for a GPU; so does
    is_token_in_rank where it is made. Weft has no channels: items by channel count as if the first
    channel moved everything, so each column holds the total.
    """

    maker = "what Buffer.dispatch returned"

    def __init__(
        self,
        plan: Plan,
        is_token_in_rank: Tensor | None,
        has_topk: bool,
        ids: Tensor | None,
        num_channels: int,
        hosts: Hosts,
    ) -> None:
        self.plan = plan
        self.items = _SEVERAL_HOSTS if hosts.are_several else _ONE_HOST
        self._is_token_in_rank = is_token_in_rank
        self.has_topk = has_topk
        self._ids = ids
        self._num_channels = num_channels
        self._hosts = hosts

    @property
    def is_token_in_rank(self) -> Tensor:
        """bool [T, R]: which ranks each token goes to."""
        if self._is_token_in_rank is None:
            sent = on_host(self.plan)["sent"]
            table = torch.zeros((len(sent), self.plan.num_tokens), dtype=torch.bool, device="cpu")
            for row, pair in zip(table, sent, strict=True):
                row[torch.tensor(pair["token"], dtype=torch.int64, device="cpu")] = True
            self._is_token_in_rank = table.t().contiguous().to(self.device)
        return self._is_token_in_rank

    @property
    def rank_prefix_matrix(self) -> Tensor:
        """int32 [R, R]: entry [i, j] counts the rows that rank j receives from ranks 0 to i.

        A rank knows its own column; the others are -1.
        """
        num_ranks = self.plan.exchange.num_ranks
        matrix = torch.full((num_ranks, num_ranks), -1, dtype=torch.int32, device=self.device)
        matrix[:, self.plan.exchange.rank] = self._rows_of_ranks().cumsum(0)
        return matrix

    @property
    def channel_prefix_matrix(self) -> Tensor:
        """int32 [R, C]: tokens that go to each rank."""
        return self._by_channel(self.is_token_in_rank.sum(0))

    @property
    def recv_channel_prefix_matrix(self) -> Tensor:
        """int32 [R, C]: rows from each rank."""
        return self._by_channel(self._rows_of_ranks())

    gbl_channel_prefix_matrix = channel_prefix_matrix
    recv_gbl_channel_prefix_matrix = recv_channel_prefix_matrix

    @property
    def recv_src_idx(self) -> Tensor:
        """int32 [N]: the number that each row's token has at its source; -1 beyond the last."""
        pairs = on_host(self.plan)["received"]
        tokens = [token for pair in pairs for token in pair["token"]]
        tokens += [-1] * (self.plan.num_rows - len(tokens))
        return torch.tensor(tokens, dtype=torch.int32, device=self.device)

    @property
    def send_head(self) -> Tensor:
        """int32 [T, R]: the place of each token among those that go to the rank, or -1."""
        return _places(self.is_token_in_rank)

    @property
    def rdma_channel_prefix_matrix(self) -> Tensor:
        """int32 [S, C]: tokens that go to each host."""
        return self._by_channel(self._is_token_in_host().sum(0))

    @property
    def recv_rdma_channel_prefix_matrix(self) -> Tensor:
        """int32 [S, C]: rows from each host."""
        return self._by_channel(self._rows_of_hosts())

    @property
    def recv_rdma_rank_prefix_sum(self) -> Tensor:
        """int32 [S]: rows that stay here from hosts 0 to i; forwarded rows are not counted."""
        return self._rows_of_hosts().cumsum(0).to(torch.int32)

    @property
    def recv_gbl_rank_prefix_sum(self) -> Tensor:
        """int32 [R]: rows from ranks 0 to i."""
        return self._rows_of_ranks().cumsum(0).to(torch.int32)

    @property
    def recv_src_meta(self) -> Tensor:
        """uint8 [N, 8], two int32 in native order: the host of each row's source (-1 beyond the
        last row); a bit for each rank of this host that the token goes to, by its place there.

        Without top-k only this rank's bit is known.
        """
        counts = self._rows_of_ranks().long()
        used = int(counts.sum())
        ranks = torch.repeat_interleave(counts)
        meta = torch.zeros((self.plan.num_rows, 2), dtype=torch.int32, device=self.device)
        meta[:, 0] = -1
        meta[:used, 0] = self._hosts.of_ranks(self.device)[ranks].to(torch.int32)
        meta[:used, 1] = self._bits_here(used)
        return meta.view(torch.uint8)

    @property
    def send_rdma_head(self) -> Tensor:
        """int32 [T, S]: the place of each token among those that go to the host, or -1."""
        return _places(self._is_token_in_host())

    @property
    def send_nvl_head(self) -> Tensor:
        """int32 [N, 8]: -1. Weft's handle does not say what a rank forwards in its host."""
        shape = (self.plan.num_rows, HOST_RANKS)
        return torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def _by_channel(self, counts: Tensor) -> Tensor:
        """Repeats counts [any]: int32 [any, C]."""
        return counts.to(torch.int32).unsqueeze(1).repeat(1, self._num_channels)

    def _rows_of_ranks(self) -> Tensor:
        """int32 [R]: rows from each rank."""
        return torch.tensor(self.plan.received_arrivals, dtype=torch.int32, device=self.device)

    def _is_token_in_host(self) -> Tensor:
        """Returns [T, S]."""
        columns = [self.is_token_in_rank[:, ranks].any(1) for ranks in self._hosts.ranks]
        return torch.stack(columns, dim=1)

    def _rows_of_hosts(self) -> Tensor:
        """int32 [S]: rows from each host."""
        by_host = torch.zeros(self._hosts.num_hosts, dtype=torch.int32, device=self.device)
        hosts = self._hosts.of_ranks(self.device)
        return by_host.index_add_(0, hosts, self._rows_of_ranks())

    def _bits_here(self, used: int) -> Tensor:
        """Returns int32 [used]: the bits of `recv_src_meta`."""
        here = self._hosts.ranks[self._hosts.here]
        own = 1 << here.index(self.plan.exchange.rank)
        bits = torch.full((used,), own, dtype=torch.int32, device=self.device)
        if self._ids is not None:
            owners = self._ids[:used].div(self.plan.num_local_experts, rounding_mode="floor")
            for place, rank in enumerate(here):
                bits |= (owners == rank).any(1).to(torch.int32) << place
        return bits


def _places(is_member: Tensor) -> Tensor:
    """Returns each True's place in its column, int32 like bool [T, any]; -1 if False."""
    place = is_member.cumsum(0) - 1
    return torch.where(is_member, place, -1).to(torch.int32)


class LowLatencyHandle(PlanHandle):
    """(src_info, layout_range, num_max, H, E) as callers know it, around a plan.

    src_info int32 [El, R * num_max]: each row's token on its source; -1 behind the last row.
    layout_range int64 [El, R]: where the rows of each source lie in the expert's block: how many in
    the low 32 bits, the first in the high ones. Both are made when they are asked for, which with a
    receive hook must be after it ran.
    """

    maker = "low_latency_dispatch's"
    items = ("src_info", "layout_range", "num_max", "hidden", "num_experts")
    _kept: Tensor | None = None  # int64 [El]
    order: Tensor | None = None  # int64 [El, R * num_max] where each row was before `keep`
    combine_rows: Tensor | None = None  # for zero_copy
    hook: Hook | None = None  # of the dispatch, if it has one
    ranks: tuple[int, ...] | None = None  # of the call, in its order, where R counts others, too

    def __init__(self, plan: Plan, sources: Tensor, num_max: int, topk_idx: Tensor) -> None:
        """sources int32 [El, R * num_max, 2]: rank and token, of plan.rows_per_expert rows.
        topk_idx [T, K]: the caller's own. The core checks combine's topk_idx against the plan."""
        exchange = plan.exchange
        self.plan, self.num_max, self._sources = plan, num_max, sources
        self.topk_idx = topk_idx.clone() if exchange.is_between_gpu_domains else topk_idx
        self.hidden, self.num_experts = exchange.hidden, exchange.num_experts
        self.stride = sources.size(1)  # of blocks

    def has_order_of(self, topk_idx: Tensor) -> bool:
        """Returns whether topk_idx is the dispatch's own memory: then no slot moves, and the call
        refuses changed values."""
        own = self.topk_idx
        if own is topk_idx:
            return True
        return own.data_ptr() == topk_idx.data_ptr() and own.stride() == topk_idx.stride()

    def keep(self, is_kept: Tensor) -> Tensor:
        """Moves the rows with `is_kept` (bool [El, R * num_max]) to the front of their blocks.

        Returns the order, for everything else that belongs to the rows.
        """
        is_kept = is_kept & self.is_row
        self.order = (~is_kept).to(torch.uint8).argsort(dim=1, stable=True)
        self._kept = is_kept.sum(1)
        blocks = torch.arange(is_kept.size(0), device=is_kept.device).unsqueeze(1)
        self._sources = self._sources[blocks, self.order]
        return self.order

    def rows_to_combine(self, use_logfmt: bool) -> Tensor:
        """Returns the rows that zero_copy combines."""
        check(not use_logfmt, "use_logfmt beside zero_copy (one of the two)")
        check(
            self.combine_rows is not None,
            "zero_copy without rows (expected in get_next_low_latency_combine_buffer)",
        )
        return self.combine_rows

    @property
    def count(self) -> Tensor:
        """int64 [El]: rows of each block."""
        return self.plan.rows_per_expert if self._kept is None else self._kept

    @property
    def shape(self) -> list[int]:
        """[El, R * num_max, H] of the rows."""
        return [self._sources.size(0), self.stride, self.hidden]

    @property
    def is_row(self) -> Tensor:
        """bool [El, R * num_max]: False behind the last row of a block."""
        slots = torch.arange(self._sources.size(1), device=self._sources.device)
        return slots < self.count.unsqueeze(1)

    @property
    def source_rank(self) -> Tensor:
        """int64 [El, R * num_max]: R behind the last row."""
        none = self.plan.exchange.num_ranks
        ranks = self._sources[..., 0].long().clamp(0, none)  # of a call that lost ranks: anything
        return torch.where(self.is_row, ranks, none)

    @property
    def src_info(self) -> Tensor:
        return torch.where(self.is_row, self._sources[..., 1], -1)

    @property
    def layout_range(self) -> Tensor:
        num_ranks = self.plan.exchange.num_ranks
        ranks = self.source_rank
        counts = ranks.new_zeros((ranks.size(0), num_ranks + 1))
        counts = counts.scatter_add_(1, ranks, torch.ones_like(ranks))[:, :num_ranks]
        found = (counts.cumsum(1) - counts) << 32 | counts
        if self.ranks is None:
            return found
        of_all = found.new_zeros((found.size(0), self.stride // self.num_max))
        of_all[:, list(self.ranks)] = found
        return of_all
