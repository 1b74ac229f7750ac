# SPDX-License-Identifier: Apache-2.0
"""Fused dispatch and combine on a `Buffer`, for the libraries that offer one. buffers.py keeps the
buffers.

Rows are those of the receiving rank: one per token and rank, ascending by source rank, then token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft import fused_a2a as state
from weft.compat import environment

from .buffers import get_buffer, get_hidden_bytes, get_uccl_buffer


class Library(NamedTuple):
    """What differs between the libraries."""

    prefix: str  # of the functions' names
    get_buffer: Callable[[Any, int], Any]  # (group, bytes of a row)
    new_event: Callable[[], Any]  # an event on the current stream


class _Call(NamedTuple):
    """What backward needs of a forward call. It holds no tensor of the caller."""

    library: Library
    group: Any
    handle: Any
    async_finish: bool
    allocate_on_comm_stream: bool

    def begin(self, x: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        """The buffer for `x`, and how its calls use streams.

        All inputs must be ready: the event stands for all the work before it.
        """
        streams = {
            "previous_event": self.library.new_event() if self.async_finish else None,
            "async_finish": self.async_finish,
            "allocate_on_comm_stream": self.allocate_on_comm_stream,
        }
        return self.library.get_buffer(self.group, get_hidden_bytes(x)), streams

    def wait(self, event: Any) -> None:
        if self.async_finish:
            event.current_stream_wait()


class Functions(NamedTuple):
    """The autograd functions on the buffers of one library, and the functions that apply them."""

    library: Library
    Dispatch: type[torch.autograd.Function]
    Combine: type[torch.autograd.Function]
    dispatch: Callable[..., Any]
    combine: Callable[..., Any]


def functions_of(library: Library) -> Functions:
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
            call = _Call(library, group, None, async_finish, allocate_on_comm_stream)
            x, indices, probs = (t.contiguous() for t in (x, token_indices, token_probs))
            buffer, streams = call.begin(x)
            per_rank, per_rdma_rank, per_expert, is_in_rank, layout_event = (
                buffer.get_dispatch_layout(indices, num_experts, **streams)
            )
            streams["previous_event"] = layout_event
            rows, row_indices, row_probs, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=indices,
                topk_weights=probs,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                **streams,
            )
            call.wait(event)
            ctx.call = call._replace(handle=handle)
            tokens_per_expert = torch.tensor(counts, dtype=torch.int64, device="cpu")
            ctx.mark_non_differentiable(row_indices, tokens_per_expert)
            return rows, row_indices, row_probs, tokens_per_expert, handle

        @staticmethod
        @once_differentiable
        def backward(
            ctx,
            grad_output,
            grad_token_indices,
            grad_token_probs,
            grad_tokens_per_expert,
            grad_handle,
        ):
            # Probabilities travel even where nobody asked for their gradient: all ranks must call
            # alike.
            rows, probs = grad_output.contiguous(), grad_token_probs.float().contiguous()
            buffer, streams = ctx.call.begin(rows)
            x, probs, event = buffer.combine(rows, ctx.call.handle, topk_weights=probs, **streams)
            ctx.call.wait(event)
            return x, None, probs, None, None, None, None

    class FusedCombine(torch.autograd.Function):
        """`fused_combine` with autograd; arguments by position."""

        @staticmethod
        def forward(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
            ctx.call = _Call(library, group, handle, async_finish, allocate_on_comm_stream)
            rows = x.contiguous()
            buffer, streams = ctx.call.begin(rows)
            tokens, _, event = buffer.combine(rows, handle=handle, **streams)
            ctx.call.wait(event)
            return tokens, None

        @staticmethod
        @once_differentiable
        def backward(ctx, grad_output, _grad_event=None):
            # The tokens' gradients, dispatched as the tokens were.
            x = grad_output.contiguous()
            buffer, streams = ctx.call.begin(x)
            rows, _, _, _, _, event = buffer.dispatch(x, handle=ctx.call.handle, **streams)
            ctx.call.wait(event)
            return rows, None, None, None, None

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

        `x` [T, H]; `token_indices` int64 [T, K], global experts, -1 = none; `token_probs` fp32
        [T, K]. Expert e lives on rank e // (num_experts / num_ranks) of `group`.

        Returns, for the N rows that this rank receives (one per token, by source rank, then token):
        rows [N, H] of x's dtype; local experts int64 [N, K], -1 where a slot's expert is elsewhere;
        probabilities fp32 [N, K], 0 there; tokens per local expert, int64 on the CPU; and the
        handle for `fused_combine`. Differentiable in `x` and `token_probs`; no input is kept for
        backward.

        `async_finish` and `allocate_on_comm_stream` choose the streams of the buffer's work; its
        results are ready for the current stream either way.
        Raises what the buffer does: weft.InvalidArgument, weft.TimeoutError, weft.PeerError.
        """
        routing = (token_indices, token_probs, num_experts)
        streams = (async_finish, allocate_on_comm_stream)
        return FusedDispatch.apply(x.contiguous(), *routing, group, *streams)

    def fused_combine(
        x: torch.Tensor,
        group: dist.ProcessGroup,
        handle: Any,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Sums the rows of each token over the ranks, unweighted. Collective.

        `x` [N, H] in the row order of the dispatch that made `handle`. Returns
        `(tokens [T, H], None)`; a token without experts is zero. Differentiable in `x`, which is
        not kept for backward.
        """
        return FusedCombine.apply(x, group, handle, async_finish, allocate_on_comm_stream)

    made = Functions(library, FusedDispatch, FusedCombine, fused_dispatch, fused_combine)
    for function in made[1:]:
        prefix = library.prefix if isinstance(function, type) else library.prefix.lower() + "_"
        if library.prefix:
            function.__name__ = function.__qualname__ = prefix + function.__name__
    return made


DEEPEP = functions_of(Library("", get_buffer, lambda: state.EventOverlap(state.EventHandle())))
UCCL = functions_of(
    Library("UCCL", get_uccl_buffer, lambda: state.UCCLEventOverlap(state.UCCLEventHandle()))
)
_, FusedDispatch, FusedCombine, fused_dispatch, fused_combine = DEEPEP
_, UCCLFusedDispatch, UCCLFusedCombine, uccl_fused_dispatch, uccl_fused_combine = UCCL


def set_deepep_num_sms(num_sms: int) -> None:
    """Sets how many SMs the exchanges of every `Buffer` use (an even number)."""
    state.Buffer.set_num_sms(num_sms)


def set_uccl_num_sms(num_sms: int) -> None:
    """Sets how many SMs the exchanges of every `UCCLBuffer` use (an even number)."""
    state.UCCLBuffer.set_num_sms(num_sms)


def set_uccl_num_sms_from_environment() -> None:
    """UCCL_EP_SM_NUMS, else DEEP_EP_SM_NUMS, else 20. Raises InvalidArgument for odd numbers."""
    set_uccl_num_sms(environment.number("UCCL_EP_SM_NUMS", "DEEP_EP_SM_NUMS", default=20, least=0))
