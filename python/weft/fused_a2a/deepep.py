# SPDX-License-Identifier: Apache-2.0
"""Fused dispatch and combine on a `Buffer`."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft import fused_a2a as state

from . import rank_rows
from .buffers import get_buffer
from .expert_rows import ByExpert
from .rank_rows import Call, Library


def _new_event() -> Any:
    return state.EventOverlap(state.EventHandle())


_LIBRARY = Library(get_buffer, _new_event)


class FusedDispatch(torch.autograd.Function):
    """`fused_dispatch` with autograd; arguments by position."""

    @staticmethod
    def forward(
        ctx,
        x,
        token_indices,
        token_probs,
        num_experts,
        group,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        call = Call(group, None, async_finish, allocate_on_comm_stream)
        return rank_rows.dispatch(_LIBRARY, ctx, x, token_indices, token_probs, num_experts, call)

    @staticmethod
    @once_differentiable
    def backward(
        ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, grad_handle
    ):
        grad_x, grad_probs = rank_rows.dispatch_backward(
            _LIBRARY, ctx, grad_output, grad_token_probs
        )
        return grad_x, None, grad_probs, None, None, None, None


class FusedCombine(torch.autograd.Function):
    """`fused_combine` with autograd; arguments by position."""

    @staticmethod
    def forward(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
        call = Call(group, handle, async_finish, allocate_on_comm_stream)
        return rank_rows.combine(_LIBRARY, ctx, x, call), None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, previous_event=None):
        return rank_rows.combine_backward(_LIBRARY, ctx, grad_output), None, None, None, None


def fused_dispatch(
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Sends each token to the ranks that own its experts. Collective; zero tokens are fine.

    `x` [T, H]; `token_indices` int64 [T, K], global experts, -1 = none; `token_probs` fp32 [T, K].
    Expert e lives on rank e // (num_experts / num_ranks) of `group`.

    Returns, for the N rows that this rank receives (one per token, by source rank, then token):
    rows [N, H] of x's dtype; local experts int64 [N, K], -1 where a slot's expert is elsewhere;
    probabilities fp32 [N, K], 0 there; tokens per local expert, int64 on the CPU; and the handle
    for `fused_combine`. Differentiable in `x` and `token_probs`; no input is kept for backward.

    `async_finish` and `allocate_on_comm_stream` choose the streams of the buffer's work; its
    results are ready for the current stream either way.
    Raises what the buffer does: weft.InvalidArgument, weft.TimeoutError, weft.PeerError.
    """
    return FusedDispatch.apply(
        x.contiguous(),
        token_indices,
        token_probs,
        num_experts,
        group,
        async_finish,
        allocate_on_comm_stream,
    )


def fused_combine(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    handle: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, None]:
    """Sums the rows of each token over the ranks, unweighted. Collective.

    `x` [N, H] in the row order of the dispatch that made `handle`. Returns `(tokens [T, H], None)`;
    a token without experts is zero. Differentiable in `x`, which is not kept for backward.
    """
    return FusedCombine.apply(x, group, handle, async_finish, allocate_on_comm_stream)


BY_EXPERT = ByExpert(_LIBRARY, (fused_dispatch, fused_combine))


def set_deepep_num_sms(num_sms: int) -> None:
    """Sets how many SMs the exchanges of every `Buffer` use (an even number)."""
    state.Buffer.set_num_sms(num_sms)
