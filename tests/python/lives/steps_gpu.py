# SPDX-License-Identifier: Apache-2.0
"""Steps with CUDA graphs: calls are captured and replayed, with other routes each time, among all
the eager calls of the same exchanges and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from life import Kept, Life, same, step
from reference import Batch, Rows
from steps_doors import both_modes, low_latency_batch
from steps_exchange import check_rows, choices_of

import weft


class Captured(NamedTuple):
    """A graph, and the memory that it reads and writes. made: what its calls have returned, which
    keeps a handle or plan alive, or only the tensors."""

    graph: torch.cuda.CUDAGraph
    given: tuple[torch.Tensor, ...]  # x, idx, weights, and what each row is multiplied by
    made: tuple[Any, ...]
    check: Callable[[Life, tuple, Rows, Batch], None]


def filled(life: Life, how: dict, batch: Batch, given: tuple) -> Rows:
    """Inputs of the batch in the graph's memory."""
    rows = Rows(batch, life.rank, **how)
    for place, value in zip(given, (*life.own_part(batch), rows.factors(batch.dtype))):
        place.copy_(value)
    return rows


def captured(life: Life, call: Callable[..., tuple], check: Callable, **what) -> None:
    """Captures call(*given), which all ranks have made before, and keeps the graph. what: batch,
    holder and how of `Kept`."""
    batch, how = what["batch"], what["how"]
    rows = Rows(batch, life.rank, **how)
    given = (*life.own_part(batch), life.there(rows.factors(batch.dtype)))
    given = tuple(one.clone() for one in given)
    for _ in range(2):
        check(life, call(*given), rows, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call(*given)
    if life.chance(0.5):
        made = (None, *made[1:])  # its handle is gone
    life.keep("graph", Kept(Captured(graph, given, made, check), rows, **what))


@step(2, lives="steady", device="cuda")
def capture_low_latency(life: Life) -> None:
    buffer, (batch, most) = both_modes(life), low_latency_batch(life)
    sizes, shape = (most, batch.num_experts), (batch.local, -1, 1)

    def call(x, idx, weights, by) -> tuple:
        got, count, handle, *_ = buffer.low_latency_dispatch(x, idx, *sizes, use_fp8=False)
        sums, *_ = buffer.low_latency_combine(got * by.view(shape), idx, weights, handle)
        return handle, got, count, sums

    def check(life: Life, made: tuple, rows: Rows, batch: Batch) -> None:
        _, got, count, sums = made
        same("counts", count, rows.counts.int())
        check_rows("rows", got.flatten(0, 1), rows, batch.x)
        x, weights = batch.of(life.rank, batch.x), batch.of(life.rank, batch.weights)
        same("sums", sums, rows.sums(x, weights=weights))

    how = {"layout": "expert_strided", "stride": life.num_ranks * most}
    captured(life, call, check, batch=batch, holder=buffer, how=how)


@step(2, lives="steady", device="cuda")
def capture_plan(life: Life) -> None:
    """Plan, dispatch and combine with a number of rows that is given."""
    held = life.held()
    options, how = choices_of(life, held, "any")
    if options["layout"] != "expert_strided":
        budget = life.rng.choice([16, 200]) * how.get("pad", 1)
        options["row_budget"], how["budgets"] = budget, [budget] * life.num_ranks
    elif options["expert_stride"] == 0:
        options["expert_stride"] = how["stride"] = 40
    exchange = held.exchange
    topk = min(exchange.max_topk, life.rng.choice([1, 2, 3]))
    tokens = life.tokens(min(12, exchange.max_tokens))
    batch = life.batch(held.hidden, held.num_experts, "any", topk, tokens)
    at_once, order = life.chance(0.5), options.get("order", "rank")

    def call(x, idx, weights, by) -> tuple:
        if at_once:
            plan, moved = weft.plan_and_dispatch(exchange, idx, x, weights, **options)
        else:
            plan = exchange.plan(idx, **options)
            moved = weft.dispatch(plan, x, weights)
        sums, back = weft.combine(plan, moved.rows * by, moved.weights)
        return plan, moved.rows, moved.weights, sums, back

    def check(life: Life, made: tuple, rows: Rows, batch: Batch) -> None:
        _, got, row_weights, sums, back = made
        check_rows("rows", got, rows, batch.x)
        defined = rows.is_defined
        want = rows.row_weights(batch.weights)
        same("row weights", row_weights.cpu()[defined], want[defined])
        same("sums", sums, rows.sums(batch.of(life.rank, batch.x), order=order))
        same("weights", back, torch.where(rows.taken(), batch.of(life.rank, batch.weights), 0.0))

    captured(life, call, check, batch=batch, holder=held, how=how)


@step(14, lives="steady", device="cuda")
def replay(life: Life) -> None:
    """A graph of before, whatever has been called since."""
    kept = life.found("graph")
    if kept is None:
        return
    graph, given, made, check = kept.handle
    old = kept.batch
    sizes = (old.hidden, old.topk, old.num_experts, old.dtype, old.kind)
    for _ in range(life.rng.choice([1, 1, 3])):
        batch = Batch(life.gen, old.tokens, *sizes)
        rows = filled(life, kept.how, batch, given)
        graph.replay()
        check(life, made, rows, batch)
