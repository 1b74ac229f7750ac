# SPDX-License-Identifier: Apache-2.0
"""Buffers of fleets whose ranks receive a token once, with its choices and weights: in a block for
each source (`RankBlocks`) or one after the other (`FlatRows`)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import Plan
from weft.compat.deep_ep.checks import FLOATS, INTEGERS, check, check_tensor
from weft.compat.deep_ep.payload import Payload, Received, numbers, row_major
from weft.compat.deep_ep.runtime import Call, Runtime, without_gradients
from weft.compat.deep_ep.steps import Steps
from weft.compat.nixl_ep import Buffer
from weft.outputs import SkippedPlan


class Sizes(NamedTuple):
    """Sizes of the calls of a fleet, the same on all ranks."""

    num_ranks: int  # R, ranks that are masked included
    most: int  # tokens of a rank
    num_experts: int  # of the capacity
    hidden: int  # elements of a row that is combined

    @property
    def num_rows(self) -> int:
        return self.num_ranks * self.most


class ReceivedRows(NamedTuple):
    """Result of `dispatch_rows`; rows to combine lie in the same places as `x`'s."""

    x: Tensor  # [R * most, columns of what was sent]
    experts: Tensor  # int64 [R * most, K]: this rank's, from 0; -1 for any other, none and no row
    weights: Tensor  # fp32 [R * most, K]: 0 where experts is -1
    counts: Tensor  # rows that carry a token: int32 [R] of each source's block, or int64 [1] of all
    plan: Plan | SkippedPlan
    runtime: Runtime  # of the ranks that made it
    ranks: tuple[int, ...]  # these


class RowsBuffer(Buffer):
    """A `nixl_ep.Buffer`, with ranks that connect and leave as there, and its own calls."""

    @without_gradients
    def dispatch_rows(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, sizes: Sizes
    ) -> ReceivedRows:
        """Collective. Sends x, without a GPU wait.

        x [T, any], T up to sizes.most, of any dtype, in rows of a multiple of 16 bytes. topk_idx
        int64 or int32 [T, K], K up to 32: only experts of the call's ranks are choices.
        topk_weights [T, K] of any float.
        """
        ranks, runtime = self._call_ranks(), self._runtime()
        wants = self._layout(sizes)
        with self._by(ranks, runtime), Call("dispatch", runtime.exchanges, **wants) as call:
            payload = _payload(x, sizes.hidden)
            num_tokens = payload.num_tokens
            check(num_tokens <= sizes.most, f"x has {num_tokens} tokens (at most {sizes.most})")
            check_tensor("topk_ids", topk_idx, INTEGERS, [num_tokens, "K"])
            check(topk_weights is not None, "the handle has no HandleAlgoKnobTopKWeights")
            check_tensor("weights", topk_weights, FLOATS, topk_idx.shape)
            key = (sizes.hidden, self._num_targets(len(ranks), sizes), payload.device)
            call.plans(key, sizes.most, topk_idx.size(1), with_masks=True, **wants)
            local = sizes.num_experts // self.group_size
            idx = self._mask_of(ranks).routes(topk_idx, sizes.num_experts, local)
            routing = (topk_idx, idx, topk_weights.float())
            plan, rows, *beside = self._send(call, payload, routing, sizes)
        rows = rows if rows.dtype is x.dtype else rows.view(x.dtype)
        return ReceivedRows(rows, *beside, plan, runtime, ranks)

    @without_gradients
    def combine_rows(self, received: ReceivedRows | None, x: Tensor, out: Tensor | None) -> Tensor:
        """Sums x bf16, fp16 or fp32 [..., H], rows of `received` that each rank has weighted and
        summed over its experts, into [T, H] by ascending rank; in the memory of out if given.
        Collective among the dispatch's ranks."""
        if received is None:
            with Call("combine", self._pool, "combine"):
                check(False, "a combine without a dispatch")
        runtime, plan = received.runtime, received.plan
        with (
            self._by(received.ranks, runtime),
            Call("combine", runtime.exchanges, "combine") as call,
        ):
            call.by(plan)
            check(isinstance(x, Tensor) and x.dim() > 1, "x is no tensor of rows")
            rows = x.flatten(0, -2)
            check_tensor("x", rows, FLOATS, [plan.num_rows, plan.exchange.hidden])
            is_whole = out is not None and out.is_contiguous()
            into = out if is_whole else None
            if x.is_cuda and runtime.exchanges.loses_ranks:  # what loses one leaves it as it was
                into = _cleared(into, plan.num_tokens, rows)
            combined = Steps.of(plan.exchange).combine(
                plan,
                lambda: call.exchange.combine(plan, rows, out=into).x,
                lambda: _cleared(into, plan.num_tokens, rows),
            )
        return combined if out is None or is_whole else out.copy_(combined)

    def _layout(self, sizes: Sizes) -> dict[str, Any]:
        """Returns plan options."""
        raise NotImplementedError

    def _num_targets(self, num_ranks: int, sizes: Sizes) -> int:
        """Returns how many experts the plan has, for num_ranks ranks of a call."""
        raise NotImplementedError

    def _send(
        self, call: Call, payload: Payload, routing: tuple[Tensor, Tensor, Tensor], sizes: Sizes
    ) -> tuple[Plan, Tensor, Tensor, Tensor, Tensor]:
        """Sends; routing: topk_ids, the same by the call's expert numbers, weights. Returns the
        plan and the first fields of `ReceivedRows`."""
        raise NotImplementedError


class FlatRows(RowsBuffer):
    """Rows that carry a token come first, by source and token."""

    def _layout(self, sizes: Sizes) -> dict[str, Any]:
        return {"layout": "rank_major", "row_budget": sizes.num_rows, "ignores_unknown": True}

    def _num_targets(self, num_ranks: int, sizes: Sizes) -> int:
        return num_ranks * (sizes.num_experts // self.group_size)

    def _send(
        self, call: Call, payload: Payload, routing: tuple[Tensor, Tensor, Tensor], sizes: Sizes
    ) -> tuple[Plan, Tensor, Tensor, Tensor, Tensor]:
        _, idx, weights = routing
        out = payload.send(call, idx, weights, experts=True)
        weights = out.weights.masked_fill(out.experts < 0, 0.0)  # the slack's are undefined
        return out.plan, out.rows, out.experts, weights, out.plan.num_rows_used


class RankBlocks(RowsBuffer):
    """A block of `most` rows for each source, of which the first carry its tokens in order.

    The plan sees an expert per source on each rank, with a block at a fixed place, so rows travel
    to their final place. A token's choices travel beside it.
    """

    def _layout(self, sizes: Sizes) -> dict[str, Any]:
        return {"layout": "expert_strided", "expert_stride": sizes.most}

    def _num_targets(self, num_ranks: int, sizes: Sizes) -> int:
        return num_ranks * sizes.num_ranks

    def _send(
        self, call: Call, payload: Payload, routing: tuple[Tensor, Tensor, Tensor], sizes: Sizes
    ) -> tuple[Plan, Tensor, Tensor, Tensor, Tensor]:
        topk_ids, idx, weights = routing
        lost = self._pool.lost
        local = sizes.num_experts // self.group_size
        places = idx.div(local, rounding_mode="floor")
        is_rank = (places >= 0) & (places < call.exchange.num_ranks)
        is_again = (places.unsqueeze(2) == places.unsqueeze(1)).tril(-1).any(2)
        blocks = places * sizes.num_ranks + self.rank
        targets = torch.where(is_rank & ~is_again, blocks, -1)
        chosen = torch.where(is_rank, topk_ids, -1)
        beside = (numbers(chosen), weights)

        def send(is_skipped: bool) -> Received:
            return payload.send(call, targets, beside=beside, is_skipped=is_skipped)

        out = Steps.of(call.exchange).dispatch(send)
        counts = out.plan.rows_per_expert.to(torch.int32)
        if (
            self._pool.lost != lost and not payload.tensors[0].is_cuda
        ):  # since the plan, perhaps: their rows have not come
            counts[[rank for rank in self._lost if rank < sizes.num_ranks]] = 0
        slots = torch.arange(sizes.most, device=payload.device)
        is_row = (slots < counts.unsqueeze(1)).view(-1, 1)
        ids, weights = out.beside
        experts = ids.long() - 1 - self.rank * local
        is_here = is_row & (experts >= 0) & (experts < local)
        experts, weights = torch.where(is_here, experts, -1), weights.masked_fill(~is_here, 0.0)
        return out.plan, out.rows, experts, weights, counts


def _cleared(out: Tensor | None, num_tokens: int, rows: Tensor) -> Tensor:
    """Returns zeros for the sums of rows, in `out` if given."""
    return rows.new_zeros((num_tokens, rows.size(1))) if out is None else out.zero_()


def _payload(x: Any, hidden: int) -> Payload:
    """Returns x's payload, as bytes if its width is not `hidden`."""
    check_tensor("x", x, None, ["T", "any"])
    return Payload(x if x.size(1) == hidden else row_major(x).view(torch.uint8))
