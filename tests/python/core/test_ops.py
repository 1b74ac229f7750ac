# SPDX-License-Identifier: Apache-2.0
"""Compiled layers against the eager ones."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import weft
from weft import ops

HIDDEN, LOCAL, TOPK = 16, 2, 2


def layer_of(exchange, scale, layout, budget):
    """Rows past the last block of a budget are undefined; weights are zero there."""
    key = ops.register(exchange)

    def layer(x, idx, weights):
        rows, row_weights, _, ticket = ops.dispatch(
            x, idx, weights, key, layout=layout, row_budget=budget
        )
        if layout == "rank_major":
            row_weights = row_weights.sum(1, keepdim=True)
        rows = torch.where(row_weights > 0, rows, 0.0)
        return ops.combine(torch.tanh(rows * scale) * row_weights, ticket, x.size(0))

    return layer


def compiled(rank, num_ranks, group, layout, budget):
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    scale = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(7))
    layer = layer_of(exchange, scale, layout, budget)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for step, tokens in enumerate((9 + rank, 5, 12)):
        gen = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(tokens, HIDDEN, generator=gen)
        idx = torch.randint(-1, LOCAL * num_ranks, (tokens, TOPK), generator=gen)
        weights = torch.rand(tokens, TOPK, generator=gen)
        results = []
        for call in (layer, traced):
            leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = call(leaf, idx, w)
            out.square().sum().backward()
            results.append((out.detach(), leaf.grad, w.grad))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)
    del out, results, leaf, w
    gc.collect()
    assert len(ops._plans) == 0  # a plan ends with its graph


@pytest.mark.parametrize(
    ("layout", "budget"), [("expert_major", None), ("rank_major", None), ("expert_major", 96)]
)
def test_compiled_layer_equals_eager(ranks, layout, budget):
    ranks(compiled, 2, layout, budget)


def balanced(rank, num_ranks, group, balance, layout):
    """Eager and compiled with replicas against weft.plan without them."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    key, scales = ops.register(exchange), 1.0 + torch.arange(LOCAL * num_ranks)
    stride = 64 if layout == "expert_strided" else 0

    def layer(x, idx, weights):
        rows, row_weights, counts, ticket = ops.dispatch(
            x, idx, weights, key, layout=layout, expert_stride=stride, order="topk", balance=balance
        )
        others = ops.placement(ticket, num_ranks, 2)[rank].clamp(min=0)
        of_places = torch.cat([scales[rank * LOCAL : (rank + 1) * LOCAL], scales[others]])
        if stride:
            of_rows = of_places.repeat_interleave(stride)
        else:
            of_rows = of_places.repeat_interleave(counts, output_size=rows.size(0))
        made = torch.where(row_weights > 0, rows, 0.0) * of_rows[:, None]
        return ops.combine(made * row_weights, ticket, x.size(0))

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    moved = 0
    for tokens in (9 + rank, 16):
        x, idx, weights = tokens_of(rank, tokens, num_ranks)
        idx = torch.where(torch.rand(idx.shape) < 0.7, 0, idx)  # a popular one
        plan = exchange.plan(idx, order="topk")
        counts = plan.rows_per_expert
        leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        rows, row_weights, _ = weft.dispatch(plan, leaf, w)
        own = scales[rank * LOCAL : (rank + 1) * LOCAL].repeat_interleave(counts)
        out = weft.combine(plan, rows * own[:, None] * row_weights).x
        out.square().sum().backward()
        want = (out.detach(), leaf.grad, w.grad)
        for call in (layer, traced):
            leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = call(leaf, idx, w)
            out.square().sum().backward()
            for found, expected in zip((out.detach(), leaf.grad, w.grad), want, strict=True):
                assert torch.equal(found, expected)
        moved += exchange.plan(idx, balance=balance).load.unbalanced
        moved -= exchange.plan(idx, balance=balance).load.busiest
    return moved


@pytest.mark.parametrize("layout", ["expert_major", "expert_strided"])
@pytest.mark.parametrize("how", ["number", "blocks", "placement"])
def test_compiled_layer_with_replicas_has_the_same_bits(ranks, how, layout):
    balance = {
        "number": 2,
        "blocks": weft.Balancing(2, block_rows=2),
        "placement": weft.Placement([[-1, 2], [0, -1]]),
    }[how]
    assert min(ranks(balanced, 2, balance, layout)) > 0


def faults(rank, num_ranks, group):
    with pytest.raises(weft.InvalidArgument, match="names no plan"):
        ops.plan_of(torch.tensor([12345]))
    x = torch.zeros(1, HIDDEN)
    with pytest.raises(weft.InvalidArgument, match="names no exchange"):
        ops.dispatch(x, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), "nobody")
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL)
    assert ops.register(exchange) != ops.register(exchange)  # for another layer


def test_stale_numbers_are_refused(ranks):
    ranks(faults, 1)


def tokens_of(rank, tokens, num_ranks, step=0):
    gen = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(tokens, HIDDEN, generator=gen)
    idx = torch.randint(0, LOCAL * num_ranks, (tokens, TOPK), generator=gen)
    return x, idx, torch.rand(tokens, TOPK, generator=gen)


def same_calls(rank, num_ranks, group, with_gradients):
    """Rank 1 does not use what some calls return, which the others do: it makes them all the same,
    in the order in which they are written."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    key = ops.register(exchange)

    def layer(x, idx, weights):
        rows, row_weights, _, ticket = ops.dispatch(x, idx, weights, key)
        other_rows, _, _, other_ticket = ops.dispatch(x + 1, idx.flip(1), weights, key)
        others = ops.combine(other_rows, other_ticket, x.size(0))
        out = ops.combine(rows * row_weights, ticket, x.size(0))
        ops.combine(rows, ticket, x.size(0))  # nobody uses it
        return out if rank == 1 else out + others.detach()

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for step, tokens in enumerate((4 + rank, 7)):
        x, idx, weights = tokens_of(rank, tokens, num_ranks, step)
        x.requires_grad_(with_gradients)
        counts = []
        for call in (layer, traced):
            before = exchange.stats()
            out = call(x, idx, weights)
            if with_gradients:
                out.sum().backward()
            after = exchange.stats()
            names = ("num_plans", "num_dispatches", "num_combines")
            counts.append([after[name] - before[name] for name in names])
            want = weights.sum(1, keepdim=True) * x.detach()
            if rank != 1:
                want = want + TOPK * (x.detach() + 1)
            torch.testing.assert_close(out.detach(), want)
        backward = [1, 1] if with_gradients else [0, 0]
        assert counts == [[2, 2 + backward[0], 3 + backward[1]]] * 2


@pytest.mark.parametrize("with_gradients", [False, True])
def test_no_call_is_dropped_or_moved(ranks, with_gradients):
    ranks(same_calls, 2, with_gradients)


def moved(rank, num_ranks, group):
    """Calls of two layers that changed places on one rank are told apart, and can be made again."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    names = [ops.register(exchange) for _ in range(2)]
    x, idx, weights = tokens_of(rank, 6, num_ranks)
    for name in reversed(names) if rank == 1 else names:
        with pytest.raises(weft.InvalidArgument, match="number of this call"):
            ops.dispatch(x, idx, weights, name)
    plans = {}
    for name in names:
        rows, row_weights, _, ticket = ops.dispatch(x, idx, weights, name)
        plans[name] = ticket
    with pytest.raises(weft.InvalidArgument, match="plan number"):
        ops.combine(rows, plans[names[rank]], 6)
    out = ops.combine(rows * row_weights, plans[names[0]], 6)
    torch.testing.assert_close(out, weights.sum(1, keepdim=True) * x)


def test_calls_that_changed_places_are_refused(ranks):
    ranks(moved, 2)


def by_inductor(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks, timeout=200)
    name = ops.register(exchange)

    def layer(x, idx, weights):
        rows, row_weights, _, ticket = ops.dispatch(x, idx, weights, name)
        return ops.combine(rows * row_weights, ticket, x.size(0)) + x

    traced = torch.compile(layer, fullgraph=True, dynamic=True)
    for step, tokens in enumerate((4 + rank, 7)):
        x, idx, weights = tokens_of(rank, tokens, num_ranks, step)
        torch.testing.assert_close(traced(x, idx, weights), layer(x, idx, weights))


def test_inductor_takes_open_sizes(ranks):
    ranks(by_inductor, 2, seconds=240)  # the first time it compiles torch's headers


def recomputed(rank, num_ranks, group):
    """Under activation checkpointing, with a layer beside it that is not."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    layer = layer_of(exchange, torch.ones(HIDDEN), "expert_major", None)

    def model(x, idx, weights):
        x = checkpoint(layer, x, idx, weights, use_reentrant=False, context_fn=ops.kept)
        return layer(x, idx, weights)

    traced = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for step, tokens in enumerate((5, 8 - rank)):
        x, idx, weights = tokens_of(rank, tokens, num_ranks, step)
        found = []
        for call in (model, traced):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = call(leaves[0], idx, leaves[1])
            out.square().sum().backward()
            found.append((out.detach(), *(leaf.grad for leaf in leaves)))
        for eager, graph in zip(*found, strict=True):
            torch.testing.assert_close(graph, eager)


def test_activation_checkpointing(ranks):
    ranks(recomputed, 2)


def second_derivatives(rank, num_ranks, group):
    """The operators have second derivatives without a compiler: torch.compile has none."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    key = ops.register(exchange)
    x, idx, weights = tokens_of(rank, 6, num_ranks)
    x.requires_grad_()
    weights.requires_grad_()
    rows, row_weights, _, ticket = ops.dispatch(x, idx, weights, key)
    out = ops.combine(rows * row_weights, ticket, 6)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    total = weights.sum(1, keepdim=True)
    torch.testing.assert_close(grad, 2 * total**2 * x)
    grad.sum().backward()
    torch.testing.assert_close(x.grad, (2 * total**2).expand_as(x))
    torch.testing.assert_close(weights.grad, (4 * total * x.sum(1, keepdim=True)).expand(6, TOPK))


def test_second_derivatives_of_operators(ranks):
    ranks(second_derivatives, 2)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.9 has the tag")
@pytest.mark.parametrize(
    "name", ["plan_and_dispatch", "placement", "num_rows", "take_rows", "move"]
)
def test_operators_on_tickets_are_kept_out_of_cuda_graphs(name):
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.weft, name).default.tags
