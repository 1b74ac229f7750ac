# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the fused functions on a `Buffer`, for the libraries that offer one.

Rows are those of the receiving rank: one per token and rank, ascending by source rank, then token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .buffers import get_hidden_bytes


class Library(NamedTuple):
    """What differs between the libraries."""

    get_buffer: Callable[[Any, int], Any]  # (group, bytes of a row)
    new_event: Callable[[], Any]  # an event on the current stream


class Call(NamedTuple):
    """What backward needs of a forward call. It holds no tensor of the caller."""

    group: Any
    handle: Any
    async_finish: bool
    allocate_on_comm_stream: bool

    def stream_arguments(self, library: Library) -> dict[str, Any]:
        """To be called when the inputs are ready: the event stands for all work before it."""
        return {
            "previous_event": library.new_event() if self.async_finish else None,
            "async_finish": self.async_finish,
            "allocate_on_comm_stream": self.allocate_on_comm_stream,
        }

    def wait(self, event: Any) -> None:
        if self.async_finish:
            event.current_stream_wait()


def dispatch(library: Library, ctx: Any, x, indices, probs, num_experts: int, call: Call) -> tuple:
    """Routes tokens for the first time; `call` has no handle yet."""
    x, indices, probs = x.contiguous(), indices.contiguous(), probs.contiguous()
    streams = call.stream_arguments(library)
    buffer = library.get_buffer(call.group, get_hidden_bytes(x))
    per_rank, per_rdma_rank, per_expert, is_in_rank, layout_event = buffer.get_dispatch_layout(
        indices, num_experts, **streams
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


def dispatch_backward(library: Library, ctx: Any, grad_rows, grad_row_probs) -> tuple:
    """Gradients of tokens [T, H] and of probabilities [T, K]."""
    call = ctx.call
    # Probabilities travel even where nobody asked for their gradient: all ranks must call alike.
    grad_rows, grad_row_probs = grad_rows.contiguous(), grad_row_probs.float().contiguous()
    streams = call.stream_arguments(library)
    buffer = library.get_buffer(call.group, get_hidden_bytes(grad_rows))
    grad_x, grad_probs, event = buffer.combine(
        grad_rows, call.handle, topk_weights=grad_row_probs, **streams
    )
    call.wait(event)
    return grad_x, grad_probs


def combine(library: Library, ctx: Any, rows, call: Call) -> torch.Tensor:
    """Sums each token's rows over the ranks."""
    rows = rows.contiguous()
    streams = call.stream_arguments(library)
    buffer = library.get_buffer(call.group, get_hidden_bytes(rows))
    x, _, event = buffer.combine(rows, handle=call.handle, **streams)
    call.wait(event)
    ctx.call = call
    return x


def combine_backward(library: Library, ctx: Any, grad_x) -> torch.Tensor:
    """Gradient of the rows [N, H]: the tokens' gradients, dispatched as the tokens were."""
    call = ctx.call
    grad_x = grad_x.contiguous()
    streams = call.stream_arguments(library)
    buffer = library.get_buffer(call.group, get_hidden_bytes(grad_x))
    grad_rows, _, _, _, _, event = buffer.dispatch(grad_x, handle=call.handle, **streams)
    call.wait(event)
    return grad_rows
