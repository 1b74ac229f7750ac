# SPDX-License-Identifier: Apache-2.0
"""Handle of `EPBuffer.dispatch` in buffer.py, for combine and for dispatching again."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from weft.errors import BadCall

from ..elastic.handle import EPHandle, most_expanded
from .returns import Returns, Stage


class EPBufferHandle(EPHandle):
    """An `EPHandle` that holds the caller's own topk_idx, and knows how rows return."""

    maker = "what EPBuffer.dispatch returned"

    returns: Returns
    of_width: dict[int, Returns]  # for rows of another
    recv_expert_ids: Tensor | None = None  # int32 [rows], with emit_expert_ids

    def __post_init__(self) -> None:
        super().__post_init__()
        self.of_width = {}

    @property
    def topk_idx(self) -> Tensor:
        """[T, K], as given. AssertionError if it has been written to since."""
        tensor, version = self._choices
        if version is not None and tensor._version != version:
            raise BadCall("`topk_idx` must not be modified while the EP handle is in use")
        return tensor

    @topk_idx.setter
    def topk_idx(self, tensor: Tensor) -> None:
        self._choices = (tensor, None if tensor.is_inference() else tensor._version)

    @functools.cached_property
    def num_recv_tokens(self) -> int:
        """N; without a CPU sync the most that it could be."""
        if self.has_cpu_sync and self.do_expand and self.returns.plan.layout == "rank_major":
            return self.returns.plan.num_rows
        return super().num_recv_tokens

    @property
    def num_expanded_tokens(self) -> int:
        """Rows, alignment included, with do_expand, and as many as there would be without; without
        a CPU sync the most that it could be."""
        if self.do_expand:
            return self.plan.num_rows
        if self.has_cpu_sync:
            return sum(self.num_recv_tokens_per_expert_list)
        ranks, local = self.plan.exchange.num_ranks, self.plan.exchange.num_local_experts
        tokens, topk = ranks * self.num_max_tokens_per_rank, self.ids.size(1)
        return most_expanded(tokens, topk, local, self.expert_alignment)

    @functools.cached_property
    def lines(self) -> tuple[Tensor, Tensor]:
        """With do_expand, int64 [N] and [N, K]: the number of each token (-1: none), in order, and
        the row of each of its choices here, or -1. N: num_recv_tokens."""
        num_lines, sources = self.num_recv_tokens, self.sources
        num_ranks, most = self.plan.exchange.num_ranks, self.num_max_tokens_per_rank
        is_used = sources >= 0
        number = torch.where(is_used, sources, num_ranks * most).to(torch.int64)
        seen = torch.zeros(num_ranks * most + 1, dtype=torch.int64, device=sources.device)
        seen.index_fill_(0, number, 1)
        line = torch.where(is_used, seen.cumsum(0)[number] - 1, num_lines)  # one more: for none
        row = torch.arange(sources.numel(), device=sources.device)
        numbers = torch.full((num_lines + 1,), -1, dtype=torch.int64, device=sources.device)
        numbers[line] = torch.where(is_used, number, -1)
        rows = numbers.new_full((num_lines + 1, self.ids.size(1)), -1)
        rows[line, self._choice_of(row)] = row
        return numbers[:num_lines], rows[:num_lines]

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """With do_expand: sums x [any, H] into [N, H], a token's rows by ascending choice, in fp32,
        rounded once."""
        _, table = self.lines
        x = self.fitted(x)
        sums = Stage(torch.Size((table.size(0), x.size(1))), x.device, copies_one=True)
        for rows in table.unbind(dim=1):
            sums.add(x[rows.clamp(min=0)].float(), (rows >= 0)[:, None])
        return sums.rounded(x.dtype)

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """With do_expand: turns weights [rows] into [N, K] by choice, 0 for other ranks'."""
        _, table = self.lines
        return functional.pad(self.fitted(weights), (0, 1))[table]  # -1 is the last one

    def fitted(self, rows: Tensor) -> Tensor:
        """Pads or cuts rows to as many as dispatch made: the rest belongs to no token."""
        more = self.plan.num_rows - rows.size(0)
        return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, more)) if more else rows

    @functools.cached_property
    def recv_src_metadata(self) -> Tensor:
        """int32 [N, K + 2]: number of the token; its source's rank times K, plus its last choice on
        this rank; with do_expand its row for each choice, or -1. A line without a token has -1."""
        number, choices = self.sources.to(torch.int64), self.ids
        if self.do_expand:
            number, choices = self.lines
        topk = choices.size(1)
        choice = torch.arange(topk, device=choices.device)
        last = torch.where(choices >= 0, choice, -1).amax(dim=1)
        rank = number.div(self.num_max_tokens_per_rank, rounding_mode="floor")
        rows = choices if self.do_expand else torch.full_like(choices, -1)
        first = torch.stack([number, torch.where(number >= 0, rank * topk + last, -1)], dim=1)
        return torch.cat([first, rows], dim=1).to(torch.int32)

    def expert_of_rows(self) -> Tensor:
        """int32 [rows], with do_expand: this rank's expert of each row, -1 where no token is."""
        row = torch.arange(self.sources.numel(), device=self.sources.device)
        expert = torch.bucketize(row, self.plan.expert_begin, right=True) - 1
        return torch.where(self.sources >= 0, expert, -1).to(torch.int32)
