# SPDX-License-Identifier: Apache-2.0
"""`HybridEPBuffer.dispatch` and `combine`: one row for each token on each rank, not grouped."""

from __future__ import annotations

from typing import Any

import torch

from weft import Dispatched, Plan

from .checks import check
from .hybrid_handle import PlainHandle
from .hybrid_routing import count_of, routing_of, scales_of, scatter_columns
from .hybrid_setup import HybridEPSetup
from .received import (
    numbers,
    pack_columns,
    received_numbers,
    received_topk,
    topk_of_map,
    unpack_columns,
)

Tensor = torch.Tensor


class PlainCalls(HybridEPSetup):
    """D: ranks of an NVLink domain, `num_of_hybrid_ep_ranks_per_nvlink_domain`."""

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: Any = None,
        handle: PlainHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PlainHandle]:
        """Collective. Tokens to the ranks of their experts: a row for each token on each rank.

        hidden [T, H] and scaling_factor, and the routing, as `dispatch_with_permute` takes them.
        num_dispatched_tokens: rows of the result, if the caller knows them already; nothing waits
        for a GPU then, and what does not fit is dropped, last rows first.
        num_dispatched_tokens_tensor has no meaning here.

        Returns (rows, probs, scaling_factor, handle): rows [N, H] by source rank, then token;
        probs fp32 [N, El * D]: the columns of this rank's experts within its domain, zero where a
        row has no route, zero in the other columns; None if not given.
        Raises InvalidArgument (also an AssertionError).
        """
        verb = "dispatch"
        del num_dispatched_tokens_tensor
        if handle is not None:
            return self._dispatch_again(
                handle, hidden, scaling_factor, probs, topk_idx, topk_weights
            )
        routing = routing_of(
            verb,
            num_experts=self._num_experts(verb, num_of_experts, None, topk_idx),
            routing_map=routing_map,
            probs=probs,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            may_wait=num_dispatched_tokens is None,
        )
        rows = None
        if num_dispatched_tokens is not None:
            rows = count_of(verb, "num_dispatched_tokens", num_dispatched_tokens)
        exchange = self._exchange(verb, hidden, routing, non_blocking=rows is not None)
        plan = exchange.plan(
            routing.refused,
            routing_map=routing.accepted,
            layout="rank_major",
            row_budget=rows,
        )
        experts = numbers(topk_of_map(routing.map, plan.topk))
        scales = [one for one in [scales_of(hidden, scaling_factor)] if one is not None]
        out = exchange.dispatch(
            plan,
            hidden,
            routing.probs,
            pack_columns(experts, *scales),
            num_sms=self._sms(hidden, "num_of_blocks_dispatch_api"),
        )
        assert out.scales is not None
        ids, *row_scales = unpack_columns(out.scales, experts, *scales)
        ids = received_topk(plan, received_numbers(plan, ids))
        handle = PlainHandle(plan, self._config(hidden, plan, None, False), ids)
        row_probs = None if out.weights is None else self._columns_of(handle, out.weights)
        return out.rows, row_probs, row_scales[0] if row_scales else None, handle

    def combine(
        self,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PlainHandle | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. The rows of `dispatch` back to their tokens, summed, unweighted.

        hidden [N, H] bf16, fp16 or fp32; probs fp32 [N, El * D], of which this rank's columns are
        read where a row has a route. Returns ([T, H], fp32 [T, E] or None), zero without routes.
        Raises InvalidArgument (also an AssertionError).
        """
        handle = _handle_of("combine", handle)
        plan = handle.plan
        row_probs = None
        if probs is not None:
            shape = (plan.num_rows, self._num_columns(plan))
            check(
                probs.shape == shape,
                f"combine: probs has shape {list(probs.shape)} (expected {list(shape)})",
            )
            at = self._first_column(plan) + handle.ids.clamp(min=0).to(torch.int64)
            row_probs = torch.where(handle.ids >= 0, probs.gather(1, at), 0.0)
        out = plan.exchange.combine(
            plan, hidden, row_probs, num_sms=self._sms(hidden, "num_of_blocks_combine_api")
        )
        return out.x, out.weights

    def _dispatch_again(
        self,
        handle: PlainHandle,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        probs: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PlainHandle]:
        plan = _handle_of("dispatch", handle).plan
        out = self._send_by(plan, hidden, scaling_factor, probs, topk_idx, topk_weights)
        row_probs = None if out.weights is None else self._columns_of(handle, out.weights)
        return out.rows, row_probs, out.scales, handle

    def _send_by(
        self,
        plan: Plan,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        probs: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Dispatched:
        """Along the plan of a handle; topk_idx and topk_weights in place of probs."""
        if topk_idx is not None and topk_weights is not None:
            probs = scatter_columns(topk_idx, topk_weights, plan.num_experts)
        return plan.exchange.dispatch(
            plan,
            hidden,
            probs,
            scales_of(hidden, scaling_factor),
            num_sms=self._sms(hidden, "num_of_blocks_dispatch_api"),
        )

    def _first_column(self, plan: Plan) -> int:
        """Of this rank's experts among those of its domain."""
        return self.local_rank * plan.num_local_experts

    def _num_columns(self, plan: Plan) -> int:
        """Experts of this rank's domain."""
        return plan.num_local_experts * self.num_of_hybrid_ep_ranks_per_nvlink_domain

    def _columns_of(self, handle: PlainHandle, row_weights: Tensor) -> Tensor:
        """fp32 [N, El * D] from fp32 [N, K], whose columns are a token's choices."""
        plan = handle.plan
        at = torch.where(handle.ids >= 0, handle.ids + self._first_column(plan), -1)
        return scatter_columns(at, row_weights, self._num_columns(plan))


def _handle_of(verb: str, handle: Any) -> PlainHandle:
    check(
        isinstance(handle, PlainHandle),
        f"{verb}: handle is {type(handle).__name__} (expected one of dispatch)",
    )
    return handle
