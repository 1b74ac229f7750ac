# SPDX-License-Identifier: Apache-2.0
"""order="topk": the same tokens and experts give the same bits on any number of ranks, forward and
backward, with the gradients of weights."""

import pytest
import torch

import weft
from weft import ops

HIDDEN, EXPERTS, TOPK, TOKENS = 32, 8, 5, 41


def whole():
    """Tokens, choices with holes, weights and gradients that all ranks share out."""
    gen = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=gen).to(torch.bfloat16) for _ in range(2))
    scores = torch.rand(TOKENS, EXPERTS, generator=gen)
    weights, idx = scores.topk(TOPK)
    idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
    return x, idx, weights, grad


def factor(expert):
    return torch.tensor(1 + 0.3 * expert).to(torch.bfloat16)


def layer(rank, num_ranks, group, order, how):
    """One rank's share of the output, of the gradients and of what `scale` makes of the rows."""
    share = slice(TOKENS * rank // num_ranks, TOKENS * (rank + 1) // num_ranks)
    x, idx, weights, grad = (tensor[share].clone() for tensor in whole())
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    x.requires_grad_()
    weights.requires_grad_()
    if how == "ops":
        sent = ops.dispatch(x, idx, weights, ops.register(exchange), order=order)
        rows, row_weights, counts = sent.rows, sent.row_weights, sent.rows_per_expert
    elif how == "together":
        plan, (rows, row_weights, _) = weft.plan_and_dispatch(
            exchange, idx, x, weights, order=order
        )
        counts = plan.rows_per_expert
    else:
        plan = exchange.plan(idx, weights.detach(), order=order)
        assert plan.order == order
        rows, row_weights, _ = weft.dispatch(plan, x, weights)
        counts = plan.rows_per_expert
    local = exchange.num_local_experts
    blocks = rows.split(counts.tolist())
    made = torch.cat([b * b * factor(rank * local + e) for e, b in enumerate(blocks)])
    weighted = (made * row_weights).to(torch.bfloat16)
    if how == "ops":
        out = ops.combine(weighted, sent.ticket, len(x))
    else:
        out = weft.combine(plan, weighted).x
    out.backward(grad)
    found = [out.detach(), x.grad, weights.grad]
    if how == "apart":
        found.append(weft.combine(plan, made.detach(), scale="plan").x)
        by_source = weft.combine(
            plan, made.detach(), scale="source", source_weights=weights.detach()
        ).x
        assert torch.equal(by_source, found[-1])
    return found


def of_all(ranks, num_ranks, order, how):
    """The shares of all ranks, one behind the other."""
    shares = ranks(layer, num_ranks, order, how)
    return [torch.cat(tensors) for tensors in zip(*shares, strict=True)]


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("how", ["apart", "together", "ops"])
def test_bits_do_not_depend_on_the_number_of_ranks(ranks, how):
    alone = of_all(ranks, 1, "topk", how)
    for num_ranks in (2, 4):
        assert same_bits(of_all(ranks, num_ranks, "topk", how), alone)
    by_rank = of_all(ranks, 4, "rank", how)
    assert not torch.equal(by_rank[0], alone[0])  # such sums tell orders apart
    assert not torch.equal(by_rank[1], alone[1])


def test_rows_are_added_by_choice_and_rounded_once(ranks):
    x, idx, weights, _ = whole()
    out, _, _, scaled = of_all(ranks, 2, "topk", "apart")
    for t in range(TOKENS):
        total = total_scaled = torch.zeros(HIDDEN)
        for k in range(TOPK):
            if idx[t, k] < 0:
                continue
            row = x[t] * x[t] * factor(int(idx[t, k]))
            total = total + (row * weights[t, k]).to(torch.bfloat16).float()
            total_scaled = total_scaled + row.float() * weights[t, k]
        assert torch.equal(out[t], total.to(torch.bfloat16))
        assert torch.equal(scaled[t], total_scaled.to(torch.bfloat16))


def refusals(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    x, idx, _, _ = whole()
    texts = []
    for options in (
        {"order": "topk" if rank == 1 else "rank"},
        {"order": "topk", "layout": "rank_major"},
        {"order": "sideways"},
    ):
        with pytest.raises(weft.InvalidArgument) as refused:
            exchange.plan(idx, **options)
        texts.append(str(refused.value))
    weft.dispatch(exchange.plan(idx, order="topk"), x)  # still usable
    return texts


def test_every_rank_refuses_an_order_that_cannot_be(ranks):
    first, second = ranks(refusals, 2)
    assert "order = rank here and topk on rank 1" in first[0]
    assert "order = topk here and rank on rank 0" in second[0]
    assert "order = topk (must be rank with rank_major" in first[1]
    assert "order = 'sideways' is unknown (one of: rank, topk)" in second[2]


def counted(rank, num_ranks, group):
    """Each token has two rows on each of two ranks."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    idx = torch.arange(4).expand(10, 4).contiguous()
    return [
        (plan.wire_bytes(64), plan.returned_bytes(64))
        for plan in (exchange.plan(idx), exchange.plan(idx, order="topk"))
    ]


def test_a_plan_counts_the_rows_that_return(ranks):
    for by_rank, by_choice in ranks(counted, 2):
        assert by_rank == (640, 640)
        assert by_choice == (640, 1280)
