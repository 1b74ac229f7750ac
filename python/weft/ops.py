# SPDX-License-Identifier: Apache-2.0
"""Custom operators, so that torch.compile traces a layer without a graph break.

A graph carries tensors only: in place of a plan goes a ticket, an int64 tensor [1] on the CPU whose
memory keeps the plan alive. `weft.dispatch` and `weft.combine` are the eager way to the same.
"""

import itertools
import weakref
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, library

from weft.errors import InvalidArgument
from weft.exchange import Exchange
from weft.planned import Plan

_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
_next_key = itertools.count(1)


class _Key(numpy.ndarray):
    """An array may carry attributes; torch keeps it as long as a tensor uses its memory."""


def _ticket_of(plan: Plan) -> Tensor:
    key = numpy.array([next(_next_key)], dtype=numpy.int64).view(_Key)
    key.plan = plan
    _plans[int(key[0])] = plan
    return torch.from_numpy(key)


def plan_of(ticket: Tensor) -> Plan:
    """The plan behind a ticket. Raises InvalidArgument for a copy whose original is gone."""
    plan = _plans.get(int(ticket))
    if plan is None:
        raise InvalidArgument(f"ticket: {int(ticket)} names no plan that is alive")
    return plan


def register(exchange: Exchange) -> str:
    """The name by which a graph calls an exchange. Ask for it once, outside of the graph."""
    for name, known in _exchanges.items():
        if known is exchange:
            return name
    name = f"exchange {next(_next_key)}"
    _exchanges[name] = exchange
    return name


def _exchange(name: str) -> Exchange:
    exchange = _exchanges.get(name)
    if exchange is None:
        raise InvalidArgument(f"'{name}' names no exchange that is alive (ops.register gives one)")
    return exchange


@library.custom_op("weft::plan_dispatch", mutates_args=())
def _plan_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    weights: Tensor,
    exchange: str,
    layout: str,
    pad_multiple: int,
    expert_stride: int,
    row_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan, (rows, row_weights, _) = _exchange(exchange).plan_and_dispatch(
        topk_idx,
        x,
        weights,
        layout=layout,
        pad_multiple=pad_multiple,
        expert_stride=expert_stride,
        row_budget=None if row_budget < 0 else row_budget,
    )
    return rows, row_weights, plan.padded_rows_per_expert.clone(), _ticket_of(plan)


@_plan_dispatch.register_fake
def _(x, topk_idx, weights, exchange, layout, pad_multiple, expert_stride, row_budget):  # noqa: ANN001, ANN202
    known = _exchange(exchange)
    if layout == "expert_strided" and expert_stride > 0:
        num_rows = known.num_local_experts * expert_stride
    elif row_budget >= 0:
        num_rows = row_budget
    else:
        num_rows = library.get_ctx().new_dynamic_size()
    cols = topk_idx.size(1) if layout == "rank_major" else 1
    return (
        x.new_empty((num_rows, x.size(1))),
        weights.new_empty((num_rows, cols)),
        topk_idx.new_empty((known.num_local_experts,), dtype=torch.int64),
        torch.empty((1,), dtype=torch.int64),
    )


@library.custom_op("weft::combine_rows", mutates_args=())
def _combine_rows(rows: Tensor, ticket: Tensor, num_tokens: int) -> Tensor:
    plan = plan_of(ticket)
    return plan.exchange.combine(plan, rows).x


@_combine_rows.register_fake
def _(rows, ticket, num_tokens):  # noqa: ANN001, ANN202
    return rows.new_empty((num_tokens, rows.size(1)))


@library.custom_op("weft::dispatch_backward", mutates_args=())
def _dispatch_backward(
    rows: Tensor, row_weights: Tensor, ticket: Tensor, num_tokens: int, topk: int
) -> tuple[Tensor, Tensor]:
    plan = plan_of(ticket)
    x, weights = plan.exchange.combine(plan, rows, row_weights)
    return x, weights


@_dispatch_backward.register_fake
def _(rows, row_weights, ticket, num_tokens, topk):  # noqa: ANN001, ANN202
    return rows.new_empty((num_tokens, rows.size(1))), row_weights.new_empty((num_tokens, topk))


@library.custom_op("weft::combine_backward", mutates_args=())
def _combine_backward(x: Tensor, ticket: Tensor, num_rows: int) -> Tensor:
    plan = plan_of(ticket)
    return plan.exchange.dispatch(plan, x).rows


@_combine_backward.register_fake
def _(x, ticket, num_rows):  # noqa: ANN001, ANN202
    return x.new_empty((num_rows, x.size(1)))


def _keep_dispatch(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(output[3])
    ctx.shape = inputs[1].shape


def _keep_combine(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(inputs[1])
    ctx.num_rows = inputs[0].size(0)


def _backward_of_dispatch(ctx, grad_rows, grad_row_weights, *_):  # noqa: ANN001, ANN202
    x, weights = _dispatch_backward(grad_rows, grad_row_weights, *ctx.saved_tensors, *ctx.shape)
    return x, None, weights, None, None, None, None, None


def _backward_of_combine(ctx, grad_x):  # noqa: ANN001, ANN202
    return _combine_backward(grad_x, *ctx.saved_tensors, ctx.num_rows), None, None


_plan_dispatch.register_autograd(_backward_of_dispatch, setup_context=_keep_dispatch)
_combine_rows.register_autograd(_backward_of_combine, setup_context=_keep_combine)


class Traced(NamedTuple):
    rows: Tensor  # [num_rows, hidden], dtype of x
    row_weights: Tensor  # fp32 [num_rows, 1], or [num_rows, K] with rank_major
    rows_per_expert: Tensor  # int64 [El], padding included
    ticket: Tensor  # for `combine`


def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    weights: Tensor,
    exchange: str,
    *,
    layout: str = "expert_major",
    pad_multiple: int = 1,
    expert_stride: int = 0,
    row_budget: int | None = None,
) -> Traced:
    """Collective. `weft.plan_and_dispatch` as an operator; differentiable likewise.

    x [T, hidden], topk_idx [T, K], weights fp32 [T, K]; exchange as `register` names it; the
    options as in `Exchange.plan`.
    """
    budget = -1 if row_budget is None else row_budget
    return Traced(
        *_plan_dispatch(x, topk_idx, weights, exchange, layout, pad_multiple, expert_stride, budget)
    )


def combine(rows: Tensor, ticket: Tensor, num_tokens: int) -> Tensor:
    """Collective. `weft.combine`: rows [num_rows, hidden] back to [num_tokens, hidden];
    differentiable. ticket: of `dispatch`; num_tokens: T of its x.
    """
    return _combine_rows(rows, ticket, num_tokens)
