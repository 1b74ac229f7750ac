# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine with the rows grouped by expert, on a `HybridEPBuffer`."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft import fused_a2a as state
from weft import ranges
from weft.autograd import has_gradient
from weft.compat.deep_ep.checks import check
from weft.compat.deep_ep.runtime import NoGradients
from weft.run.calls import count

from .buffers import contiguous, current_hybrid_ep_buffer, get_hybrid_ep_buffer, refusing
from .replay import _hybridep_dispatch_replay_state as replay

_BLOCKS = ("num_blocks_permute", "num_blocks_unpermute")
_ROWS = ("num_permuted_tokens", "pad_multiple")
_PREPROCESSING = "num_sms_preprocessing_api"
# Arguments that may follow `num_sms_combine_api` of `HybridEPDispatch`, by their largest
# number: three are NeMo Automodel's, six Megatron-LM's, eight Automodel's since 0.7.0.
_ORDERS = {
    3: (*_ROWS, "fused"),
    6: (*_BLOCKS, "fused", *_ROWS, _PREPROCESSING),
    8: (*_ROWS, "topk_idx", "num_experts", "fused", _PREPROCESSING, *_BLOCKS),
}
_OPTIONS = dict.fromkeys(_ORDERS[8]) | {"fused": False}


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Returns whether the function takes an argument of this name; False if that is unknown."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class HybridEPDispatch(torch.autograd.Function):
    """Autograd function of `hybrid_ep_dispatch`, by position.

    `_ORDERS` has the arguments after `num_sms_combine_api`. Backward returns as many gradients as
    forward had arguments.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        routing_map,
        probs,
        group,
        num_local_experts,
        num_sms_dispatch_api=24,
        num_sms_combine_api=24,
        *rest,
    ):
        options = _OPTIONS | dict(zip(_order_of(rest), rest))
        sms = (num_sms_dispatch_api, num_sms_combine_api)
        given = (x, routing_map, probs, group, num_local_experts)
        results, ctx.way = _dispatched(*given, *sms, options)
        ctx.mark_non_differentiable(results[3])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_probs, _scaling_factor, _counts, _handle):
        grad_hidden, grad_dense_probs = ctx.way.returned(grad_x, grad_probs)
        return (grad_hidden, None, grad_dense_probs) + (None,) * (len(ctx.needs_input_grad) - 3)


class HybridEPCombine(torch.autograd.Function):
    """`hybrid_ep_combine` with autograd; arguments by position."""

    @staticmethod
    def forward(ctx, x, handle, num_permuted_tokens=None, pad_multiple=None, fused=False):
        combined, ctx.way = _combined(x, handle, pad_multiple, fused)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x):
        return (ctx.way.sent(grad_x),) + (None,) * (len(ctx.needs_input_grad) - 1)


class _Sent(torch.autograd.Function):
    """Autograd function of `hybrid_ep_dispatch`, for the rows and their probabilities only."""

    @staticmethod
    def forward(ctx, x, probs, given):
        (rows, row_probs, *others), ctx.way = _dispatched(x, given[0], probs, *given[1:])
        return rows, row_probs, others

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_probs, _others):
        return *ctx.way.returned(grad_rows, grad_probs), None


class _Summed(torch.autograd.Function):
    """Autograd function of `hybrid_ep_combine`."""

    @staticmethod
    def forward(ctx, x, given):
        combined, ctx.way = _combined(x, *given)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.way.sent(grad), None


class _Way(NamedTuple):
    """Way by which rows were dispatched or combined, for their gradients."""

    buffer: Any
    handle: Any
    pad_multiple: int | None
    fused: bool
    num_rows: int  # of a combine

    def returned(self, rows: torch.Tensor, probs: torch.Tensor | None) -> tuple:
        """Returns gradients of a dispatch's tokens and probs."""
        return self.buffer.combine_with_unpermute(
            hidden=rows.contiguous(),
            probs=contiguous(probs),
            handle=self.handle,
            pad_multiple=self.pad_multiple,
            **_fused_argument("fuse_unpermute_combine", self.fused),
        )

    def sent(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of a combine's rows."""
        # The caller's num_permuted_tokens may be a tensor, and reading it would wait for a GPU;
        # the number of rows that were combined is the same number.
        rows, *_ = self.buffer.dispatch_with_permute(
            hidden=tokens.contiguous(),
            scaling_factor=None,
            handle=self.handle,
            pad_multiple=self.pad_multiple,
            num_permuted_tokens=self.num_rows,
            **_fused_argument("fuse_permute_dispatch", self.fused),
        )
        plan = getattr(self.handle, "plan", None)  # another library's handle has none
        return rows if plan is None else plan.without_slack(rows)


def _dispatched(
    x: torch.Tensor,
    routing_map: torch.Tensor | None,
    probs: torch.Tensor,
    group: dist.ProcessGroup,
    num_local_experts: int,
    num_sms_dispatch_api: int | None,
    num_sms_combine_api: int | None,
    options: dict[str, Any],
) -> tuple[tuple, _Way]:
    """Does `hybrid_ep_dispatch` without gradients; returns its results and the rows' `_Way`.
    options: `_OPTIONS`."""
    options = _without_unknown(options)
    settings = {
        "num_blocks_permute": options["num_blocks_permute"],
        "num_blocks_unpermute": options["num_blocks_unpermute"],
        "num_sms_preprocessing_api": options["num_sms_preprocessing_api"],
        "num_sms_dispatch_api": num_sms_dispatch_api,
        "num_sms_combine_api": num_sms_combine_api,
    }
    buffer = get_hybrid_ep_buffer(group, x, num_local_experts, settings)
    budget, pad_multiple = options["num_permuted_tokens"], options["pad_multiple"]
    fused = options["fused"]
    sent = {
        "hidden": contiguous(x),
        "probs": contiguous(probs),
        "scaling_factor": None,
        "pad_multiple": pad_multiple,
        **_fused_argument("fuse_permute_dispatch", fused),
    }
    recorded = replay.take()
    if recorded is not None:
        handle, tokens_per_expert, num_rows = recorded
        rows, row_probs, scales, *_ = buffer.dispatch_with_permute(
            **sent, handle=handle, num_permuted_tokens=num_rows if budget is None else budget
        )
    else:
        has_budget, name = budget is not None, "hybrid_ep_dispatch"
        if routing_map is not None and not ranges.IS_ON:  # as it mostly is; nothing is refused
            count(name)
            sent["routing_map"] = contiguous(routing_map)
        else:
            with refusing(name, buffer, row_budget=0 if has_budget else None):
                sent |= _routing(routing_map, options["topk_idx"], options["num_experts"])
        rows, row_probs, scales, tokens_per_expert, handle = buffer.dispatch_with_permute(
            **sent,
            num_of_experts_per_rank=num_local_experts,
            num_permuted_tokens=budget,
            non_blocking=has_budget,
        )
        replay.record(handle, tokens_per_expert)
    way = _Way(buffer, handle, pad_multiple, fused, 0)
    return (rows, row_probs, scales, tokens_per_expert, handle), way


def _combined(
    x: torch.Tensor, handle: Any, pad_multiple: int | None, fused: bool
) -> tuple[torch.Tensor, _Way]:
    """Does `hybrid_ep_combine` without gradients; returns the tokens and the rows' `_Way`."""
    way = _Way(current_hybrid_ep_buffer(), handle, pad_multiple, fused, len(x))
    combined, _ = way.buffer.combine_with_unpermute(
        hidden=contiguous(x),
        handle=handle,
        pad_multiple=pad_multiple,
        **_fused_argument("fuse_unpermute_combine", fused),
    )
    return combined, way


def hybrid_ep_dispatch(
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    group: dist.ProcessGroup,
    num_local_experts: int,
    num_sms_dispatch_api: int | None = 24,
    num_sms_combine_api: int | None = 24,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
    *,
    fused: bool = False,
    num_blocks_permute: int | None = None,
    num_blocks_unpermute: int | None = None,
    num_sms_preprocessing_api: int | None = None,
    topk_idx: torch.Tensor | None = None,
    num_experts: int | None = None,
    fuse_permute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor, Any]:
    """Sends each token to its experts, one row per route. Collective.

    `x` [T, H]; `routing_map` bool [T, E]; `probs` fp32 [T, E], dense. With `routing_map` None,
    `topk_idx` [T, K] names the experts, -1 for none, and `num_experts` is E.

    Returns P rows [P, H], grouped by local expert, each group padded with zero rows to
    `pad_multiple`; their probabilities fp32 [P]; None; the padded counts int64 [num_local_experts];
    and the handle for `hybrid_ep_combine`. Differentiable in `x` and, densely, in `probs`; no input
    is kept for backward.

    Without `num_permuted_tokens` the host learns P, and the counts are on the CPU. With it, P is
    that number, nothing waits for the device, the counts stay there, routes that do not fit are
    dropped (`handle[-1]`, int32 [1], is then 1), and rows behind the last group are undefined.

    `fused`, NeMo Automodel's `fuse_permute`, and the numbers of SMs and blocks choose how the work
    is done, not its results.
    Raises ValueError without a map or indices, or for indices without `num_experts`, and what the
    buffer does: weft.InvalidArgument, weft.TimeoutError, weft.PeerError.
    """
    options = {
        "num_permuted_tokens": num_permuted_tokens,
        "pad_multiple": pad_multiple,
        "topk_idx": topk_idx,
        "num_experts": num_experts,
        "fused": fused or fuse_permute,
        "num_sms_preprocessing_api": num_sms_preprocessing_api,
        "num_blocks_permute": num_blocks_permute,
        "num_blocks_unpermute": num_blocks_unpermute,
    }
    given = (group, num_local_experts, num_sms_dispatch_api, num_sms_combine_api, options)
    if not has_gradient(x, probs):
        with NoGradients():
            return _dispatched(x, routing_map, probs, *given)[0]
    rows, row_probs, others = _Sent.apply(x, probs, (routing_map, *given))
    return rows, row_probs, *others


def hybrid_ep_combine(
    x: torch.Tensor,
    handle: Any,
    num_permuted_tokens: int | torch.Tensor | None = None,
    pad_multiple: int | None = None,
    fused: bool = False,
    *,
    fuse_permute: bool = False,
) -> torch.Tensor:
    """Sums the rows of each token, unweighted. Collective.

    `x` [P, H] in the row order of the dispatch that made `handle`; padding rows count for nothing.
    Returns [T, H]; a token without experts is zero. Differentiable in `x`, which is not kept for
    backward. `num_permuted_tokens` is not needed: `x` has that many rows.
    """
    given = (handle, pad_multiple, fused or fuse_permute)
    if not has_gradient(x, None):
        with NoGradients():
            return _combined(x, *given)[0]
    return _Summed.apply(x, given)


def _routing(
    routing_map: torch.Tensor | None, topk_idx: torch.Tensor | None, num_experts: int | None
) -> dict[str, Any]:
    if routing_map is not None:
        return {"routing_map": contiguous(routing_map)}
    check(topk_idx is not None, "neither routing_map nor topk_idx is given")
    check(num_experts is not None, "topk_idx needs num_experts (how many there are)")
    return {"topk_idx": contiguous(topk_idx), "num_of_experts": num_experts}


def _fused_argument(name: str, fused: bool) -> dict[str, bool]:
    # Buffers without the argument are served as long as it is False.
    return {name: True} if fused else {}


def _without_unknown(options: dict[str, Any]) -> dict[str, Any]:
    """Drops options that the buffer's class is too old for, with a warning."""
    newer = ("fused", *_BLOCKS)
    if all(options[name] is _OPTIONS[name] for name in newer) or _knows_fused(
        state.HybridEPBuffer.dispatch_with_permute
    ):
        return options
    warnings.warn(
        "hybrid_ep_dispatch: fused or num_blocks_* given, but this HybridEPBuffer does not support "
        "fused permute dispatch or the block settings (uses unfused dispatch)",
        UserWarning,
        stacklevel=2,
    )
    return options | {name: _OPTIONS[name] for name in newer}


def _order_of(rest: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the arguments after `num_sms_combine_api`. In older orders the third is
    `fused`, a flag."""
    if len(rest) > 2 and isinstance(rest[2], bool):
        return _ORDERS[3 if len(rest) == 3 else 6]
    return _ORDERS[8]


@functools.cache
def _knows_fused(dispatch_with_permute: Callable) -> bool:
    return "fuse_permute_dispatch" in inspect.signature(dispatch_with_permute).parameters
