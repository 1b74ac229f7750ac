# SPDX-License-Identifier: Apache-2.0
"""Fused dispatch and combine on a `UCCLBuffer`: as on a `Buffer`, with a cache of its own."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft import fused_a2a as state
from weft.compat import environment

from . import rank_rows
from .buffers import get_uccl_buffer
from .expert_rows import ByExpert
from .rank_rows import Call, Library


def _new_event() -> Any:
    return state.UCCLEventOverlap(state.UCCLEventHandle())


_LIBRARY = Library(get_uccl_buffer, _new_event)


class UCCLFusedDispatch(torch.autograd.Function):
    """`uccl_fused_dispatch` with autograd; arguments by position."""

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


class UCCLFusedCombine(torch.autograd.Function):
    """`uccl_fused_combine` with autograd; arguments by position."""

    @staticmethod
    def forward(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
        call = Call(group, handle, async_finish, allocate_on_comm_stream)
        return rank_rows.combine(_LIBRARY, ctx, x, call), None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, _grad_event=None):
        return rank_rows.combine_backward(_LIBRARY, ctx, grad_output), None, None, None, None


def uccl_fused_dispatch(
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Like `fused_dispatch`, on the buffer of `get_uccl_buffer`."""
    return UCCLFusedDispatch.apply(
        x.contiguous(),
        token_indices,
        token_probs,
        num_experts,
        group,
        async_finish,
        allocate_on_comm_stream,
    )


def uccl_fused_combine(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    handle: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, None]:
    """Like `fused_combine`, on the buffer of `get_uccl_buffer`."""
    return UCCLFusedCombine.apply(x, group, handle, async_finish, allocate_on_comm_stream)


BY_EXPERT = ByExpert(_LIBRARY, (uccl_fused_dispatch, uccl_fused_combine))


def set_uccl_num_sms(num_sms: int) -> None:
    """Sets how many SMs the exchanges of every `UCCLBuffer` use (an even number)."""
    state.UCCLBuffer.set_num_sms(num_sms)


def set_uccl_num_sms_from_environment() -> None:
    """UCCL_EP_SM_NUMS, else DEEP_EP_SM_NUMS, else 20. Raises InvalidArgument for odd numbers."""
    set_uccl_num_sms(environment.number("UCCL_EP_SM_NUMS", "DEEP_EP_SM_NUMS", default=20, least=0))
