# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on an `ElasticBuffer`, which the caller gets from `get_elastic_buffer`."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def _stream_arguments(buffer: Any, async_finish: bool, on_comm_stream: bool) -> dict[str, Any]:
    # This buffer takes an earlier event only together with allocation on its own stream.
    event = buffer.capture() if async_finish and on_comm_stream else None
    return {
        "previous_event": event,
        "async_with_compute_stream": async_finish,
        "allocate_on_comm_stream": on_comm_stream,
    }


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
        rows, row_indices, row_probs, handle, event = buffer.dispatch(
            x.contiguous(),
            topk_idx=token_indices.contiguous(),
            topk_weights=token_probs.contiguous(),
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=num_sms,
            **_stream_arguments(buffer, async_finish, allocate_on_comm_stream),
        )
        if async_finish:
            event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.flags = (async_finish, allocate_on_comm_stream)
        counts = handle.num_recv_tokens_per_expert_list
        counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        ctx.mark_non_differentiable(row_indices, counts)
        return rows, row_indices, row_probs, counts, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, grad_handle
    ):
        async_finish, on_comm_stream = ctx.flags
        grad_x, grad_probs, event = ctx.buffer.combine(
            grad_output.contiguous(),
            handle=ctx.handle,
            topk_weights=grad_token_probs.float().contiguous(),
            num_sms=ctx.handle.num_sms,
            **_stream_arguments(ctx.buffer, async_finish, on_comm_stream),
        )
        if async_finish:
            event.current_stream_wait()
        return (None, grad_x, None, grad_probs) + (None,) * 6


class DeepepV2Combine(torch.autograd.Function):
    """`deepepv2_combine` with autograd; arguments by position."""

    @staticmethod
    def forward(ctx, buffer, x, handle, num_sms, async_finish=False, allocate_on_comm_stream=False):
        combined, probs, event = buffer.combine(
            x.contiguous(),
            handle=handle,
            num_sms=num_sms,
            **_stream_arguments(buffer, async_finish, allocate_on_comm_stream),
        )
        if async_finish:
            event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.num_sms = buffer, handle, num_sms
        ctx.flags = (async_finish, allocate_on_comm_stream)
        return combined, probs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_combined_token_probs=None):
        async_finish, on_comm_stream = ctx.flags
        grad_rows, _, _, _, event = ctx.buffer.dispatch(
            grad_output.contiguous(),
            handle=ctx.handle,
            num_sms=ctx.num_sms or ctx.handle.num_sms,
            **_stream_arguments(ctx.buffer, async_finish, on_comm_stream),
        )
        if async_finish:
            event.current_stream_wait()
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
    return DeepepV2Dispatch.apply(
        buffer,
        x,
        token_indices,
        token_probs,
        num_experts,
        num_max_tokens_per_rank,
        expert_alignment,
        num_sms,
        async_finish,
        allocate_on_comm_stream,
    )


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
