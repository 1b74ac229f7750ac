# SPDX-License-Identifier: Apache-2.0
"""Compiled layers against the eager ones."""

import gc

import pytest
import torch

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


def faults(rank, num_ranks, group):
    with pytest.raises(weft.InvalidArgument, match="names no plan"):
        ops.plan_of(torch.tensor([12345]))
    x = torch.zeros(1, HIDDEN)
    with pytest.raises(weft.InvalidArgument, match="names no exchange"):
        ops.dispatch(x, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), "nobody")
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL)
    assert ops.register(exchange) == ops.register(exchange)


def test_stale_numbers_are_refused(ranks):
    ranks(faults, 1)
