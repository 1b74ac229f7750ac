# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on an `ElasticBuffer`, which the caller gets from `get_elastic_buffer`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable


class _Call(NamedTuple):
    """What backward needs of a forward call. It holds no tensor of the caller."""

    buffer: Any
    handle: Any
    num_sms: int
    async_finish: bool
    on_comm_stream: bool

    def run(self, method: Callable[..., tuple], x: torch.Tensor, **arguments: Any) -> tuple:
        """What `method` of the buffer returns, less the event, which is waited for."""
        # This buffer takes an earlier event only together with allocation on its own stream.
        has_event = self.async_finish and self.on_comm_stream
        *results, event = method(
            x.contiguous(),
            **arguments,
            previous_event=self.buffer.capture() if has_event else None,
            async_with_compute_stream=self.async_finish,
            allocate_on_comm_stream=self.on_comm_stream,
        )
        if self.async_finish:
            event.current_stream_wait()
        return results


class DeepepV2Dispatch(torch.autograd.Function):
    """`deepepv2_dispatch` with autograd; arguments by position."""

    @staticmethod
    def forward(
        ctx,
        buffer,
        x,
        token_indices,
        token_probs,
        num_experts,
        num_max_tokens_per_rank,
        expert_alignment,
        num_sms,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        call = _Call(buffer, None, num_sms, async_finish, allocate_on_comm_stream)
        rows, row_indices, row_probs, handle = call.run(
            buffer.dispatch,
            x,
            topk_idx=token_indices.contiguous(),
            topk_weights=token_probs.contiguous(),
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=num_sms,
        )
        ctx.call = call._replace(handle=handle)
        counts = handle.num_recv_tokens_per_expert_list
        counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        ctx.mark_non_differentiable(row_indices, counts)
        return rows, row_indices, row_probs, counts, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, grad_handle
    ):
        call = ctx.call
        probs = grad_token_probs.float().contiguous()
        grad_x, grad_probs = call.run(
            call.buffer.combine,
            grad_output,
            handle=call.handle,
            topk_weights=probs,
            num_sms=call.handle.num_sms,
        )
        return (None, grad_x, None, grad_probs) + (None,) * 6


class DeepepV2Combine(torch.autograd.Function):
    """`deepepv2_combine` with autograd; arguments by position."""

    @staticmethod
    def forward(ctx, buffer, x, handle, num_sms, async_finish=False, allocate_on_comm_stream=False):
        call = _Call(buffer, handle, num_sms, async_finish, allocate_on_comm_stream)
        combined, probs = call.run(buffer.combine, x, handle=handle, num_sms=num_sms)
        ctx.call = call
        return combined, probs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_combined_token_probs=None):
        call = ctx.call
        num_sms = call.num_sms or call.handle.num_sms
        grad_rows, *_ = call.run(
            call.buffer.dispatch, grad_output, handle=call.handle, num_sms=num_sms
        )
        return (None, grad_rows) + (None,) * 4


def deepepv2_dispatch(
    buffer: Any,
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor,
    num_experts: int,
    num_max_tokens_per_rank: int,
    expert_alignment: int = 1,
    num_sms: int = 0,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Like `fused_dispatch`, on an elastic buffer.

    `num_max_tokens_per_rank` is the same on every rank and no less than any rank's T.
    `expert_alignment` rounds up the counts of tokens per expert, not the rows. `num_sms` 0 leaves
    the number to the buffer. The probability of a slot whose expert is elsewhere is undefined.
    """
    routing = (token_indices, token_probs, num_experts, num_max_tokens_per_rank)
    streams = (async_finish, allocate_on_comm_stream)
    return DeepepV2Dispatch.apply(buffer, x, *routing, expert_alignment, num_sms, *streams)


def deepepv2_combine(
    buffer: Any,
    x: torch.Tensor,
    handle: Any,
    num_sms: int = 0,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Like `fused_combine`, on an elastic buffer. `num_sms` 0 means that of the dispatch."""
    return DeepepV2Combine.apply(buffer, x, handle, num_sms, async_finish, allocate_on_comm_stream)
