# SPDX-License-Identifier: Apache-2.0
"""Custom operators, so that torch.compile traces a layer without a graph break.

A graph carries tensors only: in place of a plan goes a ticket, an int64 tensor [1] on the CPU whose
memory keeps the plan alive. `weft.dispatch` and `weft.combine` are the eager way to the same.

The operators have effects for torch: it drops none and repeats none, and its graphs keep their
order. A backend may still reorder independent calls, on some ranks only. Each name of `register`
has a number that goes with its calls, and so has a plan: if ranks' calls are in different orders,
all ranks raise, and no rows go astray.
"""

import itertools
import weakref
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, library
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from weft.errors import InvalidArgument
from weft.exchange import Exchange
from weft.outputs import Dispatched, Plan
from weft.placement import Balancing, Placement, core_balance

_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
_next_key, _next_name = itertools.count(1), itertools.count(1)


# Tickets are made, and plans found by them, on the host: a replayed CUDA graph would go by the plan
# of its capture for ever. Torch has the tag since 2.9, and leaves what lies on the CPU out before.
_ON_HOST = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


class _Key(numpy.ndarray):
    """An array may carry attributes; torch keeps it as long as a tensor uses its memory."""


def _ticket_of(plan: Plan, out: Dispatched) -> Tensor:
    key = numpy.array([next(_next_key)], dtype=numpy.int64).view(_Key)
    key.plan, plan.moved = plan, out
    _plans[int(key[0])] = plan
    return torch.from_numpy(key)


def plan_of(ticket: Tensor) -> Plan:
    """Returns a ticket's plan. Raises InvalidArgument for a copy whose original is gone."""
    plan = _plans.get(int(ticket))
    if plan is None:
        raise InvalidArgument(f"ticket: {int(ticket)} names no plan that is alive")
    return plan


def register(exchange: Exchange) -> str:
    """Returns a name by which a graph calls an exchange. Collective: call it outside the graph,
    once for each layer that must not be confused with another."""
    number = 1 + sum(known is exchange for known in _exchanges.values())
    name = f"exchange {next(_next_name)}.{number}"
    _exchanges[name] = exchange
    return name


def _exchange(name: str) -> Exchange:
    exchange = _exchanges.get(name)
    if exchange is None:
        raise InvalidArgument(f"'{name}' names no exchange that is alive (ops.register gives one)")
    return exchange


@library.custom_op("weft::plan_and_dispatch", mutates_args=(), **_ON_HOST)
def _plan_and_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    weights: Tensor,
    exchange: str,
    layout: str,
    pad_multiple: int,
    expert_stride: int,
    row_budget: int,
    order: str,
    replicas: int,
    balancing: list[int],
    placement: list[int],
) -> tuple[Tensor, Tensor]:
    plan, out = _exchange(exchange).plan_and_dispatch(
        topk_idx,
        x,
        weights,
        layout=layout,
        pad_multiple=pad_multiple,
        expert_stride=expert_stride,
        row_budget=None if row_budget < 0 else row_budget,
        order=order,
        balance=_balance_of(replicas, balancing, placement),
        number=int(exchange.rpartition(".")[2]),
    )
    return _ticket_of(plan, out), plan.padded_rows_per_expert.clone()


@_plan_and_dispatch.register_fake
def _(x, topk_idx, weights, exchange, *options):  # noqa: ANN001, ANN202
    num_places = _exchange(exchange).num_local_experts + options[-3]
    counts = topk_idx.new_empty((num_places,), dtype=torch.int64)
    return torch.empty((1,), dtype=torch.int64, device="cpu"), counts


def _balance_of(replicas: int, balancing: list[int], experts: list[int]) -> Balancing | Placement:
    """Builds `balance` from an operator's arguments: balancing has min_rows, block_rows and
    replica_rows; experts a placement or nothing."""
    if not experts:
        return Balancing(replicas, *balancing)
    placement = torch.tensor(experts, dtype=torch.int32, device="cpu").view(-1, replicas)
    return Placement(placement, block_rows=balancing[1])


@library.custom_op("weft::placement", mutates_args=(), **_ON_HOST)
def _placement(ticket: Tensor, num_ranks: int, replicas: int) -> Tensor:
    return plan_of(ticket).placement.clone()


@_placement.register_fake
def _(ticket, num_ranks, replicas):  # noqa: ANN001, ANN202
    return torch.empty((num_ranks, replicas), dtype=torch.int32, device="cpu")


# A separate operator, as one with effects cannot say how large its outputs are.


@library.custom_op("weft::num_rows", mutates_args=(), **_ON_HOST)
def _num_rows(ticket: Tensor) -> int:
    return plan_of(ticket).num_rows


@_num_rows.register_fake
def _(ticket):  # noqa: ANN001, ANN202
    return library.get_ctx().new_dynamic_size()


@library.custom_op("weft::take_rows", mutates_args=(), **_ON_HOST)
def _take_rows(
    x: Tensor, weights: Tensor, ticket: Tensor, num_rows: int, weight_cols: int
) -> tuple[Tensor, Tensor]:
    """Returns the rows and weights that the ticket's dispatch has moved."""
    plan = plan_of(ticket)
    out, plan.moved = plan.moved, None
    return out.rows, out.weights


@_take_rows.register_fake
def _(x, weights, ticket, num_rows, weight_cols):  # noqa: ANN001, ANN202
    return x.new_empty((num_rows, x.size(1))), weights.new_empty((num_rows, weight_cols))


@library.custom_op("weft::move", mutates_args=(), **_ON_HOST)
def _move(
    rows: Tensor,
    weights: Tensor | None,
    ticket: Tensor,
    num_rows: int,
    weight_cols: int,
    to_experts: bool,
) -> tuple[Tensor, Tensor]:
    """Dispatches, or combines (the adjoint); without weights the second result is empty."""
    plan = plan_of(ticket)
    call = plan.exchange.dispatch if to_experts else plan.exchange.combine
    moved, moved_weights, *_ = call(plan, rows, weights)
    if to_experts:  # it is the gradient of a combine
        moved = plan.without_slack(moved)
        moved_weights = None if moved_weights is None else plan.without_slack(moved_weights)
    return moved, rows.new_empty(0) if moved_weights is None else moved_weights


@_move.register_fake
def _(rows, weights, ticket, num_rows, weight_cols, to_experts):  # noqa: ANN001, ANN202
    moved = rows.new_empty((num_rows, rows.size(1)))
    return moved, rows.new_empty(0) if weights is None else weights.new_empty(num_rows, weight_cols)


def _keep(ctx, inputs, output) -> None:  # noqa: ANN001
    rows, weights, ticket, _, _, *rest = inputs
    to_experts = rest[0] if rest else True  # `take_rows` takes what a dispatch has moved
    ctx.save_for_backward(ticket)
    ctx.has_weights = weights is not None
    ctx.back = (rows.size(0), weights.size(1) if ctx.has_weights else 0, not to_experts)


def _move_back(ctx, grad, grad_weights) -> tuple:  # noqa: ANN001
    grad, moved = _move(
        grad, grad_weights if ctx.has_weights else None, *ctx.saved_tensors, *ctx.back
    )
    rest = (None,) * (len(ctx.needs_input_grad) - 2)
    return grad, moved if ctx.has_weights else None, *rest


_take_rows.register_autograd(_move_back, setup_context=_keep)
_move.register_autograd(_move_back, setup_context=_keep)

# A call dropped, repeated or out of order would meet a different call of the other ranks.
for _op in (_plan_and_dispatch, _take_rows, _move):
    _register_effectful_op(_op._opoverload, _EffectType.ORDERED)


class Traced(NamedTuple):
    rows: Tensor  # [num_rows, hidden], dtype of x
    row_weights: Tensor  # fp32 [num_rows, 1], or [num_rows, K] with rank_major
    rows_per_expert: Tensor  # int64 [El + R], padding included
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
    order: str = "rank",
    balance: int | Balancing | Placement = 0,
) -> Traced:
    """Collective. Does `weft.plan_and_dispatch` as an operator; as differentiable.

    x [T, hidden], topk_idx [T, K], weights fp32 [T, K]; exchange as `register` names it; the
    options as in `Exchange.plan`. With replicas `placement` says whose weights their places need.
    """
    replicas, *balancing, experts = core_balance(balance)
    budget = -1 if row_budget is None else row_budget
    ticket, counts = _plan_and_dispatch(
        x.detach(),
        topk_idx,
        weights.detach(),
        exchange,
        layout,
        pad_multiple,
        expert_stride,
        budget,
        order,
        replicas,
        balancing,
        experts,
    )
    if layout == "expert_strided" and expert_stride > 0:
        num_rows = counts.size(0) * expert_stride
    else:
        num_rows = _num_rows(ticket) if row_budget is None else row_budget
    weight_cols = topk_idx.size(1) if layout == "rank_major" else 1
    return Traced(*_take_rows(x, weights, ticket, num_rows, weight_cols), counts, ticket)


def placement(ticket: Tensor, num_ranks: int, replicas: int) -> Tensor:
    """Returns the expert of each replica of the ticket's dispatch, int32 [num_ranks, replicas] on
    the CPU, -1: none. num_ranks: the exchange's; replicas: R of `balance`, above 0."""
    return _placement(ticket, num_ranks, replicas)


def combine(rows: Tensor, ticket: Tensor, num_tokens: int) -> Tensor:
    """Collective. Sums rows [num_rows, hidden] to [num_tokens, hidden] by `weft.combine`;
    differentiable. ticket: of `dispatch`; num_tokens: T of its x.
    """
    return _move(rows, None, ticket, num_tokens, 0, False)[0]


def kept() -> tuple:
    """Serves as context_fn of torch.utils.checkpoint: operators' results are kept, not recomputed.

    Under torch.compile activation checkpointing needs it (torch 2.11 fails to repeat effects);
    elsewhere it saves the calls.
    """
    operators = [
        op._opoverload for op in (_plan_and_dispatch, _placement, _num_rows, _take_rows, _move)
    ]
    return create_selective_checkpoint_contexts(operators)
