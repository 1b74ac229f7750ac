# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine with gradients. Each is the other's adjoint, so a backward is the other
call, which has gradients again. exchange.py makes the calls.

Neither saves its input: a plan is all that backward needs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from weft.exchange import Exchange, plan_given
from weft.outputs import Combined, Dispatched, Plan


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, weights, options):  # noqa: ANN001, ANN205
        plan, out = call()
        if out.scales is not None:
            ctx.mark_non_differentiable(out.scales)
        _keep(ctx, plan, x, weights, options)
        return plan, *out

    @staticmethod
    def backward(ctx, _plan, grad_rows, grad_weights, _grad_scales):  # noqa: ANN001, ANN205
        shape = (ctx.plan.num_rows, ctx.plan.row_weight_cols)
        return None, *_undo(ctx, combine, grad_rows, grad_weights, shape), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, rows, row_weights, wire, options):  # noqa: ANN001, ANN205
        out = plan.exchange.combine(plan, rows, row_weights, wire=wire, **options)
        _keep(ctx, plan, rows, row_weights, options)
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_x, grad_weights):  # noqa: ANN001, ANN205
        shape = (ctx.plan.num_tokens, ctx.plan.weight_cols)
        rows, row_weights, _ = _undo(ctx, dispatch, grad_x, grad_weights, shape)
        # Rows behind those in use have no part in the sums.
        rows = ctx.plan.without_slack(rows)
        if row_weights is not None:
            row_weights = ctx.plan.without_slack(row_weights)
        return None, rows, row_weights, None, None


def _keep(ctx, plan, rows, weights, options) -> None:  # noqa: ANN001
    ctx.set_materialize_grads(False)
    ctx.plan, ctx.options = plan, options
    ctx.has_weights = weights is not None
    ctx.sent = (rows.dtype, rows.shape, rows.device)


def _undo(ctx, call: Callable, grad, grad_weights, shape):  # noqa: ANN001, ANN202
    """Makes the adjoint call. All ranks make it or none: missing gradients become zeros. shape: of
    grad_weights."""
    dtype, (_, cols), device = ctx.sent
    if grad is None:
        grad = torch.zeros((shape[0], cols), dtype=dtype, device=device)
    if ctx.has_weights and grad_weights is None:
        grad_weights = torch.zeros(shape, dtype=torch.float32, device=device)
    return call(ctx.plan, grad, grad_weights, **ctx.options)


def has_gradient(first: Any, second: Any) -> bool:
    """Returns whether autograd must record the call; recording costs more than the call."""
    is_wanted = getattr(first, "requires_grad", False) or getattr(second, "requires_grad", False)
    return is_wanted and torch.is_grad_enabled()


def _problem(moved: tuple[Any, ...], others: dict[str, Any]) -> str | None:
    """Tells why a call lacks derivatives that are asked for: only `moved` have them, in a backward;
    `others`, by name, have none."""
    for name, tensor in others.items():
        if has_gradient(tensor, None):
            return f"{name} has no gradient (give it detached)"
    if forward_ad._current_level >= 0:
        tensors = [one for one in (*moved, *others.values()) if isinstance(one, Tensor)]
        if any(forward_ad.unpack_dual(one).tangent is not None for one in tensors):
            return "there are no tangents of forward mode (backward has gradients)"
    return None


def _refuse_if(
    problem: str | None, verb: str, exchange: Exchange, plan: Plan | None = None, **choices: Any
) -> None:
    """Raises NotImplementedError of `problem`; all ranks refuse."""
    if problem is not None:
        exchange.refuse(verb, f"{verb}: {problem}", plan, **choices)
        raise NotImplementedError(f"{verb}: {problem}")


def plan(exchange: Exchange, topk_idx: Tensor | None = None, *args: Any, **options: Any) -> Plan:
    """Collective. Plans where tokens go: `exchange.plan` with the same arguments."""
    return exchange.plan(topk_idx, *args, **options)


def dispatch(
    plan: Plan,
    x: Tensor,
    weights: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    quantise: str = "none",
    **options: Any,
) -> Dispatched:
    """Collective. Sends tokens to experts; differentiable in `x` and `weights`.

    x [T, hidden] bf16, fp16 or fp32, or [T, any] of a one-byte dtype, moved as it is (row bytes a
    multiple of 16); made contiguous. weights fp32 [T, K], or [T, E] beside a routing map.
    scales [T, S] of any dtype, moved as bytes. quantise: bf16 becomes smaller on the way; "e4m3" or
    "e5m2": FP8 with one fp32 scale for 128 elements; "mxfp8": E4M3 with a uint8 scale (exponent +
    127) for 32; "nvfp4": uint8 [num_rows, hidden / 2], an E2M1 pair in a byte, with an E4M3 scale
    for 16 and global_scale, an option of its own, fp32 [1] (None: 1), by which the scales are
    multiplied; block_formats.py reads both. num_sms: GPU multiprocessors. copy_engines:
    whether these carry the rows between GPUs, the same on all ranks; None: if the exchange runs
    beside computation and they were measured to cost it less (docs/overlap.md). The backward takes
    both as the forward did.
    Returns rows [plan.num_rows, cols of x], padding rows zero, slack of a budget undefined;
    weights fp32 [plan.num_rows, plan.row_weight_cols], zero where no route; scales
    [plan.num_rows, S].
    Raises InvalidArgument on every rank if one rank's arguments are wrong, TimeoutError, PeerError.
    """

    plan = plan_given("dispatch", plan, x)
    others = {"scales": scales, "global_scale": options.get("global_scale")}
    _refuse_if(_problem((x, weights), others), "dispatch", plan.exchange, plan)

    def call() -> tuple[Plan, Dispatched]:
        out = plan.exchange.dispatch(plan, x, weights, scales, quantise=quantise, **options)
        return plan, out

    if not has_gradient(x, weights):
        return call()[1]
    return Dispatched(*_Dispatch.apply(call, x, weights, options)[1:])


def plan_and_dispatch(
    exchange: Exchange,
    topk_idx: Tensor | None,
    x: Tensor,
    weights: Tensor | None = None,
    scales: Tensor | None = None,
    **choices: Any,
) -> tuple[Plan, Dispatched]:
    """Collective. Does `exchange.plan` by topk_idx, then `dispatch`; differentiable likewise.

    Faster than the two calls: a GPU that tells the number of rows finds everything else ready, and
    where the number is given and tokens are few, both are one launch. choices: those of
    `Exchange.plan_and_dispatch`, which says when. Raises what the two raise.
    """

    others = {"scales": scales, "global_scale": choices.get("global_scale")}
    _refuse_if(_problem((x, weights), others), "plan_and_dispatch", exchange, **choices)

    def call() -> tuple[Plan, Dispatched]:
        return exchange.plan_and_dispatch(topk_idx, x, weights, scales, **choices)

    if not has_gradient(x, weights):
        return call()
    options = {key: choices[key] for key in ("num_sms", "copy_engines") if key in choices}
    plan, *out = _Dispatch.apply(call, x, weights, options)
    return plan, Dispatched(*out)


def combine(
    plan: Plan,
    rows: Tensor,
    row_weights: Tensor | None = None,
    *,
    scale: str = "none",
    source_weights: Tensor | None = None,
    wire: str = "none",
    **options: Any,
) -> Combined:
    """Collective. Sums rows back to their tokens; differentiable in `rows` and `row_weights`.

    rows [plan.num_rows, hidden] bf16, fp16 or fp32. row_weights fp32 like those of `dispatch`,
    usually gradients. scale "plan": each row times its route's weight in the plan; "source": times
    source_weights fp32 [T, K] (not with rank_major); both raise NotImplementedError where a
    gradient is asked for. wire: what bf16 rows,
    of a hidden size that is a multiple of 128, travel as: "fp8" takes about half the bytes,
    "logfmt10" two thirds; docs/wire.md has their errors. The backward is a dispatch and stays
    exact. num_sms and copy_engines: see `dispatch`.
    Returns x [T, hidden]: sums in fp32, the rows of a rank first (rounded once), then ranks in
    ascending order (rounded once), or by choice if the plan has order "topk"; zeros for a token
    without routes. weights fp32 [T, K] or [T, E].
    Raises InvalidArgument on every rank if one rank's arguments are wrong, TimeoutError, PeerError.
    """
    plan = plan_given("combine", plan, rows)
    others = {"source_weights": source_weights, "out": options.get("out")}
    has_wish = has_gradient(rows, row_weights)
    problem = _problem((rows, row_weights), others)
    wants_weights = scale == "plan" and plan.wants_weight_gradient and torch.is_grad_enabled()
    if scale != "none" and (has_wish or wants_weights):
        problem = f"scale = '{scale}' has no gradient (multiply the rows by their weights)"
    elif has_wish and others["out"] is not None:
        problem = "what is written to out has no gradient (leave it out)"
    _refuse_if(problem, "combine", plan.exchange, plan)
    if has_wish:
        return Combined(*_Combine.apply(plan, rows, row_weights, wire, options))
    return plan.exchange.combine(
        plan, rows, row_weights, scale=scale, source_weights=source_weights, wire=wire, **options
    )
