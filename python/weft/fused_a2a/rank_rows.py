# SPDX-License-Identifier: Apache-2.0
"""Fused dispatch and combine on a `Buffer`, for the libraries that offer one, and on an
`ElasticBuffer`, which the caller gets from `get_elastic_buffer`. buffers.py keeps the buffers.

A receiving rank's rows are one per token, ascending by source rank, then token; or, by expert in
one step, in the order of a permute.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

import weft
from weft import Plan
from weft import fused_a2a as state
from weft.autograd import has_gradient
from weft.compat import environment
from weft.compat.deep_ep.checks import FLOATS, check_routing, check_tensor
from weft.compat.deep_ep.layout import routes_of
from weft.compat.deep_ep.runtime import MIN_TOKENS, MIN_TOPK, NoGradients

from .buffers import contiguous, get_buffer, get_hidden_bytes, get_uccl_buffer, pool_of, refusing
from .replay import _dispatch_replay_state as replay

_LAYOUT = (  # what get_dispatch_layout returns, before the event
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "is_token_in_rank",
)


class Library(NamedTuple):
    """Differences between the libraries that offer a `Buffer`."""

    prefix: str  # of the functions' names
    get_buffer: Callable[[Any, int], Any]  # (group, bytes of a row)
    new_event: Callable[[], Any]  # an event on the current stream

    def begin(self, x: torch.Tensor, group: Any, streams: tuple[bool, bool]) -> tuple[Any, dict]:
        """Returns the buffer for `x`, and its calls' stream options. streams: (async_finish,
        allocate_on_comm_stream).

        All inputs must be ready: the event stands for all work before.
        """
        async_finish, allocate_on_comm_stream = streams
        is_rows = isinstance(x, Tensor) and x.ndim == 2  # the buffer's call refuses others
        return self.get_buffer(group, get_hidden_bytes(x) if is_rows else 0), {
            "previous_event": self.new_event() if async_finish else None,
            "async_finish": async_finish,
            "allocate_on_comm_stream": allocate_on_comm_stream,
        }

    # The four ways of rows, without gradients. streams: as for `begin`.

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        probs: Tensor,
        num_experts: int,
        group: Any,
        streams: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
        """Returns what `fused_dispatch` returns."""
        buffer, how = self.begin(x, group, streams)
        is_own = pool_of(buffer) is not None  # one of Weft's takes tensors with gaps, too
        if not is_own:
            x, indices, probs = contiguous(x), contiguous(indices), contiguous(probs)
        mode = replay.mode
        recorded = None if mode is None else replay.take()
        if recorded is not None:
            handle, *metadata = recorded
            rows = waited(buffer.dispatch(x, handle=handle, **how), streams[0])[0]
            return rows, *(each.detach() for each in metadata), handle
        if is_own:  # needs no layout
            results = buffer.dispatch_by_topk(x, indices, probs, num_experts, **how)
            rows, indices, probs, counts, handle = waited(results, streams[0])
        else:
            *layout, event = buffer.get_dispatch_layout(indices, num_experts, **how)
            how["previous_event"] = event
            routing = {"topk_idx": indices, "topk_weights": probs, **dict(zip(_LAYOUT, layout))}
            results = buffer.dispatch(x, **routing, **how)
            rows, indices, probs, counts, handle = waited(results, streams[0])
            counts = _on_host(counts)
        if mode == "record":
            # Detached: what is handed out becomes a part of the graph, which is not to be kept.
            replay.record((handle, *(each.detach() for each in (indices, probs, counts))))
        return rows, indices, probs, counts, handle

    def return_gradients(
        self, rows: Tensor, probs: Tensor, group: Any, handle: Any, streams: tuple[bool, bool]
    ) -> list:
        """Returns gradients of a dispatch's x and probabilities. The latter always travel: all
        ranks must call alike."""
        rows, probs = rows.contiguous(), probs.float().contiguous()
        buffer, how = self.begin(rows, group, streams)
        return waited(buffer.combine(rows, handle, topk_weights=probs, **how), streams[0])

    def combine(self, x: Tensor, group: Any, handle: Any, streams: tuple[bool, bool]) -> Tensor:
        """Sums rows."""
        rows = contiguous(x)
        buffer, how = self.begin(rows, group, streams)
        return waited(buffer.combine(rows, handle=handle, **how), streams[0])[0]

    def send_gradients(
        self, x: Tensor, group: Any, handle: Any, streams: tuple[bool, bool]
    ) -> Tensor:
        """Returns the gradients of a combine's rows: the tokens', dispatched as the tokens were."""
        x = x.contiguous()
        buffer, how = self.begin(x, group, streams)
        return waited(buffer.dispatch(x, handle=handle, **how), streams[0])[0]


def waited(results: tuple, async_finish: bool) -> list:
    """Waits for the event of a buffer's call; returns the other results."""
    *results, event = results
    if async_finish:
        event.current_stream_wait()
    return results


def _on_host(counts: Any) -> Tensor:
    """Makes CPU int64."""
    if isinstance(counts, Tensor) and counts.dtype is torch.int64 and counts.is_cpu:
        return counts
    return torch.as_tensor(counts, dtype=torch.int64, device="cpu")


def dispatched(ctx: Any, rows: Any, indices: Any, probs: Any, counts: Any, handle: Any):
    """Hands the results of a dispatch to autograd: indices and counts have no gradients."""
    counts = _on_host(counts)
    ctx.mark_non_differentiable(indices, counts)
    return rows, indices, probs, counts, handle


class ExpertRows(NamedTuple):
    """Plan and settings of a dispatch for its combine, without tensors of the caller."""

    plan: Plan
    num_sms: int

    @property
    def local_experts(self) -> Tensor:
        """int64 [P, 1] on the plan's device: the local expert of each row, -1 for padding."""
        plan = self.plan
        row = torch.arange(plan.num_rows, device=plan.exchange.device)
        end = plan.expert_begin + plan.padded_rows_per_expert
        expert = torch.searchsorted(end, row, right=True)
        is_padding = row >= (plan.expert_begin + plan.rows_per_expert)[expert]
        return expert.masked_fill(is_padding, -1).unsqueeze(1)


class Functions(NamedTuple):
    """The autograd functions on the buffers of one library, and the functions that apply them."""

    library: Library
    Dispatch: type[torch.autograd.Function]
    Combine: type[torch.autograd.Function]
    dispatch: Callable[..., Any]
    combine: Callable[..., Any]

    # For callers who would permute the rows. They run on the exchanges of the same buffer.

    def dispatch_by_expert(
        self,
        x: Tensor,
        token_indices: Tensor,
        token_probs: Tensor,
        num_experts: int,
        group: dist.ProcessGroup,
        pad_multiple: int = 1,
        num_sms: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, ExpertRows]:
        """Collective. Does `fused_dispatch` and a permute, bit for bit: rows ascend by local
        expert, source rank, token; but every row is written once, to its final place. Arguments as
        of `fused_dispatch`; x bf16, fp16 or fp32 [T, H]. On the current stream.

        pad_multiple: zero rows of probability 0 fill each expert's rows up to a multiple of it.
        num_sms: GPU multiprocessors of each exchange, forward and backward; 0: by Weft's table.
        Returns rows [P, H]; their probabilities fp32 [P, 1]; rows per local expert, padding
        included, int64 [El] on the CPU; and the handle for `combine_by_expert`. Differentiable in
        `x` and `token_probs`; no input is kept for backward. Waits once for a GPU, to learn P; not
        where it is replayed (`dispatch_replay_scope`).
        Raises what the exchange does: InvalidArgument, TimeoutError, PeerError.
        """
        buffer, _ = self.library.begin(x, group, (False, False))
        recorded = replay.take()
        verb = "plan_and_dispatch" if recorded is None else "dispatch"
        with refusing("dispatch", buffer, verb=verb) as call:
            buffer._runtime()  # while it has one
            check_tensor("x", x, FLOATS, ["T", "H"])
            check_routing(token_indices, token_probs, x.size(0))
            num_sms = num_sms if x.is_cuda else 0
            if recorded is not None:
                handle, counts = recorded
                out = weft.dispatch(call.by(handle.plan), x, token_probs, num_sms=num_sms)
                return out.rows, out.weights, counts, handle
            topk = max(MIN_TOPK, token_indices.size(1))
            exchange = call.plans((x.size(1), num_experts, x.device), MIN_TOKENS, topk)
            routes = routes_of(token_indices, num_experts)
            plan, out = weft.plan_and_dispatch(
                exchange, routes, x, token_probs, pad_multiple=pad_multiple, num_sms=num_sms
            )
        # This comes after the launch: a GPU has nothing to do between the wait and that.
        counts = plan.core.padded_rows_on_host()
        handle = ExpertRows(plan, num_sms)
        replay.record((handle, counts))
        return out.rows, out.weights, counts, handle

    def combine_by_expert(self, rows: Tensor, handle: ExpertRows) -> Tensor:
        """Collective. Sums rows [P, H] of the dispatch that made `handle` into tokens [T, H], bit
        for bit like an unpermute and `fused_combine`, without a separate pass.

        Sums a token's rows on each rank in fp32, rounds, then sums over ranks; unweighted, without
        padding rows. Differentiable in `rows`, which is not kept for backward.
        """
        return weft.combine(handle.plan, rows, num_sms=handle.num_sms).x


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
            ctx.group, ctx.streams = group, (async_finish, allocate_on_comm_stream)
            given = (x, token_indices, token_probs, num_experts, group)
            results = library.dispatch(*given, ctx.streams)
            ctx.mark_non_differentiable(results[1], results[3])
            ctx.handle = results[-1]
            return results

        @staticmethod
        @once_differentiable
        def backward(ctx, grad_output, _indices, grad_token_probs, _counts, _handle):
            way = (ctx.group, ctx.handle, ctx.streams)
            x, probs = library.return_gradients(grad_output, grad_token_probs, *way)
            return x, None, probs, None, None, None, None

    class FusedCombine(torch.autograd.Function):
        """`fused_combine` with autograd; arguments by position."""

        @staticmethod
        def forward(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
            ctx.way = group, handle, (async_finish, allocate_on_comm_stream)
            return library.combine(x, *ctx.way), None

        @staticmethod
        @once_differentiable
        def backward(ctx, grad_output, _grad_event=None):
            return library.send_gradients(grad_output, *ctx.way), None, None, None, None

    class Sent(torch.autograd.Function):
        """Autograd function of `fused_dispatch`, for the rows and their probabilities only."""

        @staticmethod
        def forward(ctx, x, probs, routing):
            indices, num_experts, group, streams = routing
            rows, indices, probs, counts, handle = library.dispatch(
                x, indices, probs, num_experts, group, streams
            )
            ctx.way = group, handle, streams
            return rows, probs, (indices, counts, handle)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad_rows, grad_probs, _rest):
            return *library.return_gradients(grad_rows, grad_probs, *ctx.way), None

    class Summed(torch.autograd.Function):
        """Autograd function of `fused_combine`."""

        @staticmethod
        def forward(ctx, x, way):
            ctx.way = way
            return library.combine(x, *way)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return library.send_gradients(grad, *ctx.way), None

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
        streams = (async_finish, allocate_on_comm_stream)
        if not has_gradient(x, token_probs):
            with NoGradients():
                given = (x, token_indices, token_probs, num_experts, group)
                return library.dispatch(*given, streams)
        routing = (token_indices, num_experts, group, streams)
        rows, probs, (indices, counts, handle) = Sent.apply(x, token_probs, routing)
        return rows, indices, probs, counts, handle

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
        way = (group, handle, (async_finish, allocate_on_comm_stream))
        if not has_gradient(x, None):
            with NoGradients():
                return library.combine(x, *way), None
        return Summed.apply(x, way), None

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
    """Sets UCCL_EP_SM_NUMS, else DEEP_EP_SM_NUMS, else 20. InvalidArgument for odd numbers."""
    set_uccl_num_sms(environment.number("UCCL_EP_SM_NUMS", "DEEP_EP_SM_NUMS", default=20, least=0))


def _elastic(
    method: str, buffer: Any, x: torch.Tensor, streams: tuple[bool, bool], **arguments: Any
) -> list:
    """Calls an elastic buffer's method, and waits."""
    async_finish, allocate_on_comm_stream = streams
    # This buffer takes an earlier event only together with allocation on its own stream.
    event = buffer.capture() if async_finish and allocate_on_comm_stream else None
    results = getattr(buffer, method)(
        contiguous(x),
        **arguments,
        previous_event=event,
        async_with_compute_stream=async_finish,
        allocate_on_comm_stream=allocate_on_comm_stream,
    )
    return waited(results, async_finish)


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
        ctx.buffer, ctx.streams = buffer, (async_finish, allocate_on_comm_stream)
        *rows, handle = _elastic(
            "dispatch",
            buffer,
            x,
            ctx.streams,
            topk_idx=contiguous(token_indices),
            topk_weights=contiguous(token_probs),
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=num_sms,
        )
        ctx.handle = handle
        return dispatched(ctx, *rows, handle.num_recv_tokens_per_expert_list, handle)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, _indices, grad_token_probs, _counts, _handle):
        arguments = {"handle": ctx.handle, "num_sms": ctx.handle.num_sms}
        probs = grad_token_probs.float().contiguous()
        call = ("combine", ctx.buffer, grad_output, ctx.streams)
        grad_x, grad_probs = _elastic(*call, topk_weights=probs, **arguments)
        return (None, grad_x, None, grad_probs) + (None,) * 6


class DeepepV2Combine(torch.autograd.Function):
    """`deepepv2_combine` with autograd; arguments by position."""

    @staticmethod
    def forward(ctx, buffer, x, handle, num_sms, async_finish=False, allocate_on_comm_stream=False):
        ctx.buffer, ctx.streams = buffer, (async_finish, allocate_on_comm_stream)
        ctx.handle, ctx.num_sms = handle, num_sms
        call = ("combine", buffer, x, ctx.streams)
        return tuple(_elastic(*call, handle=handle, num_sms=num_sms))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, _grad_probs=None):
        call = ("dispatch", ctx.buffer, grad_output, ctx.streams)
        num_sms = ctx.num_sms or ctx.handle.num_sms
        rows, *_ = _elastic(*call, handle=ctx.handle, num_sms=num_sms)
        return (None, rows) + (None,) * 4


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

    All ranks pass the same `num_max_tokens_per_rank`. It is at least the largest T of all ranks.
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
