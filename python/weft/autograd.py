# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine with gradients. Each is the other's adjoint, so there is no other backward.
exchange.py makes the calls.

Neither saves its input: a plan is all that backward needs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.exchange import Exchange
from weft.outputs import Combined, Dispatched
from weft.planned import Plan


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, x, weights, scales, quantise, options):  # noqa: ANN001, ANN205
        ctx.plan, ctx.options = plan, options
        ctx.set_materialize_grads(False)
        out = plan.exchange.dispatch(plan, x, weights, scales, quantise=quantise, **options)
        _keep_dispatch(ctx, x, weights, out)
        return out.rows, out.weights, out.scales

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_weights, _grad_scales):  # noqa: ANN001, ANN205
        return None, *_undo_dispatch(ctx, grad_rows, grad_weights), None, None, None


class _PlanAndDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, topk_idx, x, weights, scales, choices, options):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        plan, out = exchange.plan_and_dispatch(topk_idx, x, weights, scales, **choices, **options)
        ctx.plan, ctx.options = plan, options
        _keep_dispatch(ctx, x, weights, out)
        return plan, out.rows, out.weights, out.scales

    @staticmethod
    @once_differentiable
    def backward(ctx, _plan, grad_rows, grad_weights, _grad_scales):  # noqa: ANN001, ANN205
        return None, None, *_undo_dispatch(ctx, grad_rows, grad_weights), None, None, None


def _keep_dispatch(ctx, x, weights, out) -> None:  # noqa: ANN001
    ctx.mark_non_differentiable(*(t for t in (out.scales,) if t is not None))
    _keep(ctx, x, weights)


def _undo_dispatch(ctx, grad_rows, grad_weights) -> Combined:  # noqa: ANN001
    plan = ctx.plan
    grads = _filled(ctx, grad_rows, grad_weights, plan.num_rows, plan.row_weight_cols)
    return plan.exchange.combine(plan, *grads, **ctx.options)


def _keep(ctx, rows, weights) -> None:  # noqa: ANN001
    ctx.has_weights = weights is not None
    ctx.sent = (rows.dtype, rows.shape, rows.device)


def _filled(ctx, grad, grad_weights, num_rows, weight_cols):  # noqa: ANN001, ANN202
    """All ranks call in the backward or none: what a rank does not use gets zeros."""
    dtype, shape, device = ctx.sent
    if grad is None:
        grad = torch.zeros((num_rows, shape[1]), dtype=dtype, device=device)
    if ctx.has_weights and grad_weights is None:
        grad_weights = torch.zeros((num_rows, weight_cols), dtype=torch.float32, device=device)
    return grad, grad_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, rows, row_weights, options):  # noqa: ANN001, ANN205
        ctx.plan, ctx.options = plan, options
        ctx.set_materialize_grads(False)
        out = plan.exchange.combine(plan, rows, row_weights, **options)
        _keep(ctx, rows, row_weights)
        return out.x, out.weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_weights):  # noqa: ANN001, ANN205
        plan = ctx.plan
        grads = _filled(ctx, grad_x, grad_weights, plan.num_tokens, plan.weight_cols)
        out = plan.exchange.dispatch(plan, *grads, **ctx.options)
        return None, out.rows, out.weights, None


def _has_gradient(first: Tensor, second: Tensor | None) -> bool:
    """Whether autograd must know of the call; telling it costs more than the call itself."""
    is_wanted = first.requires_grad or (second is not None and second.requires_grad)
    return is_wanted and torch.is_grad_enabled()


def plan(exchange: Exchange, topk_idx: Tensor | None = None, *args: Any, **options: Any) -> Plan:
    """Collective. Where every token goes: `exchange.plan` with the same arguments."""
    return exchange.plan(topk_idx, *args, **options)


def dispatch(
    plan: Plan,
    x: Tensor,
    weights: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    quantise: str = "none",
    num_sms: int = 0,
    copy_engines: bool | None = None,
) -> Dispatched:
    """Collective. Tokens to their experts; differentiable in `x` and `weights`.

    x [T, hidden] bf16, fp16 or fp32, or [T, any] of a one-byte dtype, moved as it is (row bytes a
    multiple of 16); made contiguous. weights fp32 [T, K], or [T, E] beside a routing map.
    scales [T, S] of any dtype, moved as bytes. quantise "e4m3" or "e5m2": bf16 becomes FP8 on the
    way, with one fp32 scale for 128 elements (GPU). num_sms: GPU multiprocessors. copy_engines:
    whether these carry the rows between GPUs, the same on all ranks; None: if the exchange runs
    beside computation and they were measured to cost it less (docs/overlap.md). The backward takes
    both as the forward did.
    Returns rows [plan.num_rows, cols of x], padding rows zero, slack of a budget undefined;
    weights fp32 [plan.num_rows, plan.row_weight_cols], zero where no route; scales
    [plan.num_rows, S].
    Raises InvalidArgument on every rank if one rank's arguments are wrong, TimeoutError, PeerError.
    """
    options = {"num_sms": num_sms, "copy_engines": copy_engines}
    if not _has_gradient(x, weights):
        return plan.exchange.dispatch(plan, x, weights, scales, quantise=quantise, **options)
    return Dispatched(*_Dispatch.apply(plan, x, weights, scales, quantise, options))


def plan_and_dispatch(
    exchange: Exchange,
    topk_idx: Tensor | None,
    x: Tensor,
    weights: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    num_sms: int = 0,
    copy_engines: bool | None = None,
    **choices: Any,
) -> tuple[Plan, Dispatched]:
    """Collective. `exchange.plan` with topk_idx, then `dispatch` by it; differentiable likewise.

    Faster than the two calls: a GPU that tells the number of rows finds everything else ready, and
    where the number is given and tokens are few, both are one launch. choices: those of
    `Exchange.plan_and_dispatch`, which says when. Raises what the two raise.
    """
    options = {"num_sms": num_sms, "copy_engines": copy_engines}
    if not _has_gradient(x, weights):
        return exchange.plan_and_dispatch(topk_idx, x, weights, scales, **choices, **options)
    plan, *out = _PlanAndDispatch.apply(exchange, topk_idx, x, weights, scales, choices, options)
    return plan, Dispatched(*out)


def combine(
    plan: Plan,
    rows: Tensor,
    row_weights: Tensor | None = None,
    *,
    scale: str = "none",
    source_weights: Tensor | None = None,
    num_sms: int = 0,
    copy_engines: bool | None = None,
) -> Combined:
    """Collective. Rows back to their tokens, summed; differentiable in `rows` and `row_weights`.

    rows [plan.num_rows, hidden] bf16, fp16 or fp32. row_weights fp32 like those of `dispatch`,
    usually gradients. scale "plan": each row times its route's weight in the plan; "source": times
    source_weights fp32 [T, K] (not with rank_major); neither has gradients. num_sms and
    copy_engines: see `dispatch`.
    Returns x [T, hidden]: sums in fp32, the rows of a rank first (rounded once), then ranks in
    ascending order (rounded once); zeros for a token without routes. weights fp32 [T, K] or [T, E].
    Raises InvalidArgument on every rank if one rank's arguments are wrong, TimeoutError, PeerError.
    """
    options = {"num_sms": num_sms, "copy_engines": copy_engines}
    if scale == "none" and _has_gradient(rows, row_weights):
        return Combined(*_Combine.apply(plan, rows, row_weights, options))
    if scale != "none" and _has_gradient(rows, None):
        raise NotImplementedError(
            f"combine: scale = '{scale}' has no gradient (multiply the rows by their weights)"
        )
    return plan.exchange.combine(
        plan, rows, row_weights, scale=scale, source_weights=source_weights, **options
    )
