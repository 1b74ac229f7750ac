# SPDX-License-Identifier: Apache-2.0
"""`ElasticBuffer.combine`."""

from __future__ import annotations

from typing import Any

import torch

from weft import Plan

from .checks import check
from .elastic_base import ElasticBase, sms_of, wait_for
from .elastic_handle import EPHandle, handle_of
from .events import EventOverlap, event_of

Tensor = torch.Tensor


class ElasticCombine(ElasticBase):
    """Rows back to their tokens."""

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Collective. Rows as `dispatch` returned them, summed into their tokens, unweighted.

        x [rows, H] bf16, fp16 or fp32; topk_weights fp32 like those of `dispatch`; bias: one or two
        [T, H], added in fp32 before the one rounding. A rank's rows of a token are summed and
        rounded first, unless the buffer was made without allow_multiple_reduction, or there is a
        bias: rows then travel as fp32, which takes twice the bytes of bf16.
        Streams and events as for `dispatch`.
        Returns (tokens [T, H], weights fp32 [T, K] or None, event): zeros for a token without rows
        (plus bias), and for a weight without a choice.
        Raises InvalidArgument (also an AssertionError).
        """
        self.check_call("combine", num_qps, previous_event, allocate_on_comm_stream)
        plan = handle_of("combine", handle).plan
        biases = _biases_of(x, plan, bias)
        with self._comm.call(
            x.device,
            [x, topk_weights, *biases],
            previous_event=previous_event,
            async_finish=async_with_compute_stream,
        ) as call:
            wait_for(previous_event_before_epilogue, x)
            row_weights = topk_weights
            if topk_weights is not None and handle.do_expand:
                row_weights = topk_weights.reshape(-1, 1)
            one_rounding = bool(biases) or (handle.do_expand and not self.allow_multiple_reduction)
            out, weights = handle.plan.exchange.combine(
                handle.plan,
                x.float() if one_rounding else x,
                row_weights,
                num_sms=sms_of(x, num_sms or handle.num_sms),
            )
            for one in biases:
                out = out + one.float()
            combined = out.to(x.dtype)
            call.returns(combined, weights)
        return combined, weights, event_of(call)


def _biases_of(x: Tensor, plan: Plan, bias: Tensor | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    if bias is None:
        return []
    biases = [bias] if isinstance(bias, Tensor) else list(bias)
    check(len(biases) <= 2, f"combine: {len(biases)} biases (at most two)")
    biases = [one for one in biases if one is not None]
    for one in biases:
        check(
            one.shape == (plan.num_tokens, x.size(1)),
            f"combine: bias has shape {list(one.shape)} "
            f"(expected [{plan.num_tokens}, {x.size(1)}])",
        )
    return biases
