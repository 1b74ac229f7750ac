# SPDX-License-Identifier: Apache-2.0
"""Handle of `ElasticBuffer.dispatch` in buffer.py, for combine and for dispatching again."""

import dataclasses
import functools

import torch
from torch import Tensor

from weft import Plan

from ..handles import on_host
from ..payload import round_up


def most_expanded(num_tokens: int, topk: int, num_local: int, alignment: int) -> int:
    """Returns the most rows of a rank with do_expand. num_tokens: of all ranks; num_local: experts
    of a rank."""
    rows = num_tokens * min(topk, num_local) + (alignment - 1) * num_local
    return round_up(rows, alignment)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class EPHandle:
    """A plan with the fields that callers read. N: tokens that reach this rank, once each.

    do_expand: one row for each (token, local expert), grouped by expert; else one for each token.
    num_experts, expert_alignment, num_max_tokens_per_rank: as in the dispatch.
    num_sms: the dispatch's; 0 leaves the choice to Weft, here and in later calls.
    topk_idx [T, K]: the choices.
    num_recv_tokens_per_expert_list: rows of each local expert, rounded up to expert_alignment;
    empty without a CPU sync.
    token_metadata_at_forward, channel_linked_list: None; there is no second hop to remember.
    """

    maker = "what dispatch returned"
    token_metadata_at_forward = channel_linked_list = None

    plan: Plan
    do_expand: bool
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_scaleup_ranks: int
    has_cpu_sync: bool
    sources: Tensor  # int32 [rows]: the token, rank * num_max_tokens_per_rank + t; -1: none
    ids: Tensor  # int32 [rows, K]: its choices as local experts; -1: none

    def __post_init__(self) -> None:
        self.num_experts = self.plan.num_experts
        self.num_recv_tokens_per_expert_list: list[int] = []
        if self.has_cpu_sync:
            counts = self.plan.rows_per_expert_list
            aligned = [round_up(count, self.expert_alignment) for count in counts]
            self.num_recv_tokens_per_expert_list = aligned
        else:
            # A replayed CUDA graph must make these anew, so they cannot wait for a first question.
            _ = self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert

    @functools.cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """int32 [El]: choices of each local expert."""
        return self.plan.rows_per_expert.to(torch.int32)

    @functools.cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """int32 [El], running sums of aligned counts; with do_expand the last count is unaligned.

        So with do_expand this is where each expert's real rows end.
        """
        counts = self.num_unaligned_recv_tokens_per_expert
        align = self.expert_alignment
        aligned = (counts + (align - 1)).div(align, rounding_mode="floor") * align
        ends = aligned.cumsum(0)
        if self.do_expand:
            ends = ends - aligned + counts
        return ends.to(torch.int32)

    @functools.cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """int32 [scale-up ranks], running sums of N by the source's scale-up rank."""
        num_ranks, most = self.plan.exchange.num_ranks, self.num_max_tokens_per_rank
        seen = torch.zeros(num_ranks * most + 1, dtype=torch.int32, device=self.sources.device)
        at = torch.where(self.sources >= 0, self.sources, num_ranks * most).to(torch.int64)
        seen.index_fill_(0, at, 1)
        scaleup = self.num_scaleup_ranks
        per_rank = seen[:-1].view(num_ranks // scaleup, scaleup, most).sum(dim=(0, 2))
        return per_rank.cumsum(0).to(torch.int32)

    @functools.cached_property
    def num_recv_tokens(self) -> int:
        """N; without a CPU sync the most that it could be."""
        if not self.has_cpu_sync:
            return self.plan.exchange.num_ranks * self.num_max_tokens_per_rank
        if not self.do_expand:
            return self.plan.num_rows
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1])

    @property
    def num_expanded_tokens(self) -> int:
        """Rows, alignment included, with do_expand; else 0."""
        return self.plan.num_rows if self.do_expand else 0

    @functools.cached_property
    def recv_src_metadata(self) -> Tensor:
        """int32 [N, K + 2]: number of the token; its first row; its row for each choice, or -1.

        In order of the tokens' numbers. Without do_expand there are as many lines as rows and no
        rows of choices; a line past N has -1. With do_expand a GPU is waited for.
        """
        if not self.do_expand:
            rows = torch.arange(self.sources.numel(), dtype=torch.int32, device=self.ids.device)
            first = torch.where(self.sources >= 0, rows, -1)
            return torch.cat(
                [torch.stack([self.sources, first], dim=1), torch.full_like(self.ids, -1)], dim=1
            )
        row = (self.sources >= 0).nonzero().flatten()
        tokens, line = self.sources[row].unique(return_inverse=True)
        slots = torch.full(
            (tokens.numel(), self.ids.size(1)), -1, dtype=torch.int32, device=self.ids.device
        )
        slots[line, self._choice_of(row)] = row.to(torch.int32)
        rows_or_last = torch.where(slots >= 0, slots, self.plan.num_rows)
        first = rows_or_last.amin(dim=1).to(torch.int32)
        return torch.cat([tokens.unsqueeze(1), first.unsqueeze(1), slots], dim=1)

    def _choice_of(self, row: Tensor) -> Tensor:
        """Returns which of its token's K choices each row is, int64. An expert chosen twice has two
        adjacent rows, for the first choice and the second."""
        place = torch.arange(row.numel(), device=row.device)
        expert = torch.bucketize(row, self.plan.expert_begin, right=True) - 1
        tokens = self.sources[row]
        is_first = torch.ones_like(place, dtype=torch.bool)
        is_first[1:] = (tokens[1:] != tokens[:-1]) | (expert[1:] != expert[:-1])
        nth = place - torch.where(is_first, place, 0).cummax(0).values
        is_same = self.ids[row] == expert.unsqueeze(1)
        is_it = is_same & (is_same.cumsum(1) == nth.unsqueeze(1) + 1)
        return is_it.to(torch.uint8).argmax(dim=1)

    @functools.cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """int32 [T, K]: the row of each choice on its expert's rank, or -1. Copies the plan to the
        host, and waits for a GPU."""
        slots = on_host(self.plan)["route_slot"]
        table = torch.tensor(slots, dtype=torch.int32, device=self.plan.exchange.device)
        return table.view(self.plan.num_tokens, self.plan.topk)
