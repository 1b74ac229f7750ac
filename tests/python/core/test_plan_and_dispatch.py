# SPDX-License-Identifier: Apache-2.0
"""plan_and_dispatch against plan, then dispatch."""

import pytest
import torch

import weft
from oracle import HIDDEN, inputs
from weft import outputs


def in_one_call(rank, num_ranks, group, layout):
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_tokens=32)
    x, idx, weights = inputs(rank, (17, 0, 5)[rank % 3], 3, num_experts, torch.bfloat16)
    options = {"layout": layout, "row_budget": 40}
    if layout == "expert_strided":
        options = {"layout": layout, "expert_stride": 12}
    scales = x[:, :4].contiguous()
    plan, made = ex.plan_and_dispatch(idx, x, weights, scales, plan_weights=weights, **options)
    expected = ex.plan(idx, weights, **options)
    rows, row_weights, row_scales = ex.dispatch(expected, x, weights, scales)
    assert plan.overflow.tolist() == expected.overflow.tolist()
    assert plan.rows_per_expert.tolist() == expected.rows_per_expert.tolist()
    is_row = torch.arange(plan.num_rows) < plan.num_rows_used
    if layout == "expert_strided":
        is_row = torch.arange(12).repeat(4) < plan.rows_per_expert.repeat_interleave(12)
    assert torch.equal(made.rows[is_row], rows[is_row])
    assert torch.equal(made.weights[is_row], row_weights[is_row])
    assert made.scales.dtype == scales.dtype
    assert torch.equal(made.scales[is_row], row_scales[is_row])
    out, _ = ex.combine(plan, made.rows, scale="none" if layout == "rank_major" else "plan")
    assert out.shape == x.shape


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_strided"])
def test_plan_and_dispatch_in_one_call(ranks, layout):
    ranks(in_one_call, 2, layout)


def is_same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other) if a is not None or b is not None)


def rows_open(rank, num_ranks, group, layout):
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_tokens=64)
    pad = 1 if layout == "rank_major" else 4
    options = {"layout": layout, "pad_multiple": pad}
    # As many as before, a few more, many more, none; then more than there is room for, on one rank.
    for seed, tokens in enumerate((40, 40, 41, 60, 0, 5, 40, 100 if rank == 0 else 1, 30)):
        x, idx, weights = inputs(rank, tokens, 3, num_experts, seed=seed)
        scales = x[:, :4].contiguous()
        plan, made = ex.plan_and_dispatch(idx, x, weights, scales, **options)
        expected = ex.plan(idx, **options)
        assert plan.num_rows == expected.num_rows == made.rows.size(0)
        if layout != "expert_strided":  # where the rest of a block is left as it was
            assert is_same(made, ex.dispatch(expected, x, weights, scales))
        out, _ = ex.combine(plan, made.rows)
        assert torch.equal(out, ex.combine(expected, made.rows).x)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_strided"])
def test_rows_are_told_by_the_plan(ranks, layout):
    ranks(rows_open, 3, layout)


def from_map(rank, num_ranks, group):
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    x, idx, _ = inputs(rank, 9 + rank, 3, num_experts)
    chosen = torch.zeros(x.size(0), num_experts + 1).scatter_(1, idx % (num_experts + 1), 1.0)
    chosen = chosen[:, :-1].bool().contiguous()
    probs = torch.rand(chosen.shape)
    given = {"row_budget": 64}
    for options in ({}, {"layout": "rank_major"}, given, given | {"overflow": "error"}):
        plan, made = ex.plan_and_dispatch(None, x, probs, routing_map=chosen, **options)
        expected = ex.plan(routing_map=chosen, **options)
        used = slice(0, int(expected.num_rows_used))
        wanted = ex.dispatch(expected, x, probs)
        assert is_same((made.rows[used], made.weights[used]), (wanted[0][used], wanted[1][used]))
    with pytest.raises(weft.InvalidArgument, match="row_budget = 1"):
        ex.plan_and_dispatch(None, x, routing_map=chosen, row_budget=1, overflow="error")

    longer = torch.ones(x.size(0), num_experts, dtype=torch.bool)  # in a row than there is room for
    small = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_topk=2)
    for seen in (chosen[:, :2].any(1, keepdim=True) & (torch.arange(num_experts) < 2), longer):
        options = {"routing_map": seen.contiguous(), "layout": "rank_major"}
        plan, made = small.plan_and_dispatch(None, x, probs, **options)
        expected = small.plan(**options)
        assert is_same(made, small.dispatch(expected, x, probs))


def test_routing_maps(ranks):
    ranks(from_map, 2)


def gradients(rank, num_ranks, group):
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    x, idx, weights = inputs(rank, 9 + rank, 3, num_experts)

    def grads(both):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        plan, out = both(*leaves)
        tokens, _ = weft.combine(plan, out.rows * out.weights)
        tokens.backward(x)
        return [leaf.grad for leaf in leaves]

    def two_calls(x, weights):
        plan = ex.plan(idx)
        return plan, weft.dispatch(plan, x, weights)

    expected = grads(two_calls)
    for _ in range(2):
        assert is_same(
            grads(lambda x, weights: weft.plan_and_dispatch(ex, idx, x, weights)), expected
        )
    plan, out = weft.plan_and_dispatch(ex, idx, x.requires_grad_())
    assert out.weights is None and out.rows.requires_grad
    with torch.no_grad():
        assert not weft.plan_and_dispatch(ex, idx, x)[1].rows.requires_grad


def test_gradients(ranks):
    ranks(gradients, 2)


def refused(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 5, 2, 4)
    bad = torch.full_like(idx, 7) if rank == 1 else idx
    with pytest.raises(weft.InvalidArgument, match="7"):
        ex.plan_and_dispatch(bad, x)
    with pytest.raises(weft.InvalidArgument):
        ex.plan_and_dispatch(idx, x[:4] if rank == 1 else x)
    for options in ({}, {"row_budget": 40}, {"row_budget": 40} if rank == 1 else {}):
        for wrong in (x[:4], x.double(), x[0]):
            with pytest.raises(weft.InvalidArgument):
                ex.plan_and_dispatch(idx, wrong if rank == 1 else x, **options)
        for flat in (idx, idx[:, 0].contiguous()):  # one choice of each token
            plan, out = ex.plan_and_dispatch(flat, x, layout="rank_major", **options)
            assert out.rows.shape == (plan.num_rows, HIDDEN)
    with pytest.raises(weft.InvalidArgument):
        ex.plan_and_dispatch(idx, x, quantise="e9" if rank == 1 else "none")
    ex.close()
    with pytest.raises(weft.InvalidArgument, match="closed"):
        ex.plan_and_dispatch(idx.repeat(2000, 1), x.repeat(2000, 1))


def memory_short(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 64, 2, 4)
    ex.plan_and_dispatch(idx, x)
    usual, wanted = outputs.of_bytes, []

    def of_bytes(array, rows, *given):
        wanted.append(rows)
        if len(wanted) == 1 and rank == 0:
            raise weft.Error("as many rows as before", "out of memory")
        return usual(array, rows, *given)

    outputs.of_bytes = of_bytes  # of this process alone
    plan, out = ex.plan_and_dispatch(idx[:2], x[:2])
    assert out.rows.shape == (plan.num_rows, HIDDEN) and wanted[-1] == plan.num_rows
    with pytest.raises(weft.Error, match="as many rows"):
        wanted.clear()
        ex.plan_and_dispatch(idx[:2], x[:2], row_budget=8)
        assert rank == 1
        raise weft.Error("as many rows")


def test_memory_for_as_many_rows_as_before_is_no_condition(ranks):
    ranks(memory_short, 1)


def test_every_rank_raises_what_one_did_wrong(ranks):
    ranks(refused, 2)


def later(rank, num_ranks, group):
    """On CPUs a call that is received later is done at once, and a receive finds nothing to do."""
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_tokens=32)
    x, idx, weights = inputs(rank, 17, 3, num_experts, torch.bfloat16)
    plan, made = ex.plan_and_dispatch(idx, x, row_budget=80, receives_later=True)
    ex.receive(plan)
    again = ex.dispatch(plan, x).rows
    is_row = torch.arange(plan.num_rows) < plan.num_rows_used
    assert torch.equal(made.rows[is_row], again[is_row])
    options = {"scale": "source", "source_weights": weights}
    out = ex.combine(plan, again, receives_later=True, **options).x
    for _ in range(2):
        ex.receive(plan)
    assert torch.equal(out, ex.combine(plan, again, **options).x)


def test_a_call_is_received_later(ranks):
    ranks(later, 2)
