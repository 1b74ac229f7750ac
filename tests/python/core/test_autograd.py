# SPDX-License-Identifier: Apache-2.0
"""Gradients against a dense layer in double precision that torch differentiates by itself."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import weft

HIDDEN, LOCAL, TOPK = 16, 2, 2


def layer_inputs(rank, num_ranks, tokens):
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=gen)
    scores = torch.randn(tokens, LOCAL * num_ranks, generator=gen)
    weights, idx = torch.softmax(scores, 1).topk(TOPK)
    if tokens > 2:
        idx[1, 0] = -1
        idx[2] = -1
    return x, idx, weights


def expert_of(expert):
    gen = torch.Generator().manual_seed(100 + expert)
    return torch.randn(HIDDEN, HIDDEN, generator=gen) / HIDDEN**0.5


def dense(x, idx, weights, num_experts):
    """Every expert on every token."""
    out = torch.zeros_like(x)
    for expert in range(num_experts):
        share = torch.where(idx == expert, weights, torch.zeros_like(weights)).sum(1, keepdim=True)
        out = out + share * torch.tanh(x @ expert_of(expert).to(x.dtype))
    return out


def moe(exchange, x, idx, weights, layout):
    """Experts apply the weights, as Megatron-LM's do."""
    first = exchange.rank * LOCAL
    plan = exchange.plan(idx, layout=layout, pad_multiple=1 if layout == "rank_major" else 4)
    rows, row_weights, _ = weft.dispatch(plan, x, weights)
    if layout == "expert_major":
        parts = []
        for e, part in enumerate(rows.split(plan.padded_rows_per_expert.tolist())):
            parts.append(torch.tanh(part @ expert_of(first + e)))
        return weft.combine(plan, torch.cat(parts) * row_weights).x
    ids = plan_experts(exchange, plan, idx)
    out = torch.zeros_like(rows)
    for e in range(LOCAL):
        share = torch.where(ids == e, row_weights, torch.zeros(())).sum(1, keepdim=True)
        out = out + share * torch.tanh(rows @ expert_of(first + e))
    return weft.combine(plan, out).x


def plan_experts(exchange, plan, idx):
    sent = weft.dispatch(plan, torch.zeros(idx.size(0), HIDDEN), None, idx).scales
    local = sent - exchange.rank * LOCAL
    return torch.where((sent >= 0) & (local >= 0) & (local < LOCAL), local, -1)


def gradients(rank, num_ranks, group, layout, tokens, how):
    num_experts = LOCAL * num_ranks
    x, idx, weights = layer_inputs(rank, num_ranks, tokens[rank])
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    mine, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
    if how == "checkpoint":
        out = checkpoint(moe, exchange, mine, idx, w, layout, use_reentrant=False)
    else:
        out = moe(exchange, mine, idx, w, layout)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(50 + rank))
    out.backward(grad)

    exact_x, exact_w = x.double().requires_grad_(), weights.double().requires_grad_()
    want = dense(exact_x, idx, exact_w, num_experts)
    want.backward(grad.double())
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad, exact_x.grad.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w.grad, exact_w.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("tokens", [(9, 5), (0, 7), (3, 3, 0, 8)])
def test_gradients_are_those_of_a_dense_layer(ranks, layout, tokens):
    ranks(gradients, len(tokens), layout, tokens, "plain")


def test_gradients_with_recomputation(ranks):
    ranks(gradients, 2, "expert_major", (6, 9), "checkpoint")


def freed_inputs(rank, num_ranks, group):
    """Neither direction may need its input afterwards: schedules free it at once."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    x, idx, weights = layer_inputs(rank, num_ranks, 6)
    grads = []
    for frees in (False, True):
        leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        plan = exchange.plan(idx)
        sent = leaf * 1.0
        rows, row_weights, _ = weft.dispatch(plan, sent, w * 1.0)
        if frees:
            sent.untyped_storage().resize_(0)
        scaled = rows.detach().requires_grad_()
        back = weft.combine(plan, scaled * 2.0).x
        back.sum().backward()
        torch.autograd.backward([rows, row_weights], [scaled.grad, torch.ones_like(row_weights)])
        grads.append((leaf.grad, w.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    assert torch.equal(grads[1][1], (idx >= 0).float())


def test_inputs_may_be_freed_after_forward(ranks):
    ranks(freed_inputs, 2)


def weighted(rank, num_ranks, group):
    num_experts = LOCAL * num_ranks
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    x, idx, weights = layer_inputs(rank, num_ranks, 6)
    plan = weft.plan(exchange, idx, weights)
    rows = weft.dispatch(plan, x).rows
    want = x * torch.where(idx >= 0, weights, torch.zeros(())).sum(1, keepdim=True)
    torch.testing.assert_close(weft.combine(plan, rows, scale="plan").x, want)
    got = weft.combine(plan, rows, scale="source", source_weights=weights).x
    torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        weft.combine(plan, rows.requires_grad_(), scale="plan")


def test_combine_can_weigh_rows(ranks):
    ranks(weighted, 2)


def penalised(value, x, weights):
    """A loss with the square of its own gradient, and the gradients of that."""
    loss = value(x, weights).square().sum()
    first = torch.autograd.grad(loss, (x, weights), create_graph=True)
    total = loss + sum(grad.square().sum() for grad in first)
    return (*first, *torch.autograd.grad(total, (x, weights)))


def second_order(rank, num_ranks, group, layout, tokens, how):
    num_experts = LOCAL * num_ranks
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    x, idx, weights = layer_inputs(rank, num_ranks, tokens[rank])

    def together(x, weights):
        plan, (rows, row_weights, _) = weft.plan_and_dispatch(exchange, idx, x, weights)
        parts = rows.split(plan.padded_rows_per_expert.tolist())
        first = rank * LOCAL
        rows = torch.cat([torch.tanh(p @ expert_of(first + e)) for e, p in enumerate(parts)])
        return weft.combine(plan, rows * row_weights).x

    def apart(x, weights):
        return moe(exchange, x, idx, weights, layout)

    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    found = penalised(together if how == "together" else apart, *leaves)
    exact = [t.double().requires_grad_() for t in (x, weights)]
    want = penalised(lambda x, weights: dense(x, idx, weights, num_experts), *exact)
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "how"),
    [("rank_major", "apart"), ("expert_major", "apart"), ("expert_major", "together")],
)
def test_second_derivatives_are_those_of_a_dense_layer(ranks, layout, how):
    ranks(second_order, 2, layout, (9, 5), how)


def numeric(rank, num_ranks, group):
    """torch's own check, with differences in fp32: dispatch and combine are linear, and exact."""
    exchange = weft.Exchange(group, hidden=4, num_experts=2)
    idx = torch.tensor([[0, 1], [1, -1]])
    plan = exchange.plan(idx)
    x, weights = (torch.randn(2, n, generator=torch.Generator().manual_seed(1)) for n in (4, 2))
    rows, row_weights, _ = exchange.dispatch(plan, x, weights)

    def dispatched(x, weights):
        return weft.dispatch(plan, x, weights)[:2]

    def planned(x, weights):
        return weft.plan_and_dispatch(exchange, idx, x, weights)[1][:2]

    def combined(rows, row_weights):
        return weft.combine(plan, rows, row_weights)

    bounds = {"eps": 0.125, "atol": 1e-3, "rtol": 1e-3}
    for call in (dispatched, planned, combined):
        given = (rows, row_weights) if call is combined else (x, weights)
        leaves = tuple(t.clone().requires_grad_() for t in given)
        assert torch.autograd.gradcheck(call, leaves, **bounds)
        assert torch.autograd.gradgradcheck(call, leaves, **bounds)


def test_derivatives_by_differences(ranks):
    ranks(numeric, 1)


def default_type(rank, num_ranks, group):
    """Whatever torch's default type is: weights that nobody used have fp32 gradients, of zeros."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    x, idx, weights = layer_inputs(rank, num_ranks, 5)
    x.requires_grad_()
    weights.requires_grad_()
    plan = exchange.plan(idx)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        weft.dispatch(plan, x, weights).rows.sum().backward()
    finally:
        torch.set_default_dtype(usual)
    assert weights.grad.dtype == torch.float32 and not weights.grad.any()
    expected = (idx >= 0).sum(1, keepdim=True).expand(x.shape)
    torch.testing.assert_close(x.grad, expected.float())


def test_backward_under_another_default_type(ranks):
    ranks(default_type, 2)


def slack(rank, num_ranks, group, options):
    """Rows behind those in use have no part in the sums, whatever lies there."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=1)
    many, few = (torch.zeros(tokens, 1, dtype=torch.int64) for tokens in (32, 5))
    full, plan = exchange.plan(many, **options), exchange.plan(few, **options)
    nan = torch.full((32, HIDDEN), float("nan"))
    for _ in range(3):
        weft.dispatch(full, nan, nan[:, :1])  # is left in memory that is used again
        rows = torch.zeros(32, HIDDEN, requires_grad=True)
        weights = torch.zeros(32, 1, requires_grad=True)
        out = weft.combine(plan, rows, weights)
        (out.x.sum() + out.weights.sum()).backward()
        used = (torch.arange(32) < 5).float().unsqueeze(1)
        assert torch.equal(rows.grad, used.expand(32, HIDDEN))
        assert torch.equal(weights.grad, used)


@pytest.mark.parametrize(
    "options",
    [
        {"row_budget": 32},
        {"layout": "rank_major", "row_budget": 32},
        {"layout": "expert_strided", "expert_stride": 32},
    ],
)
def test_slack_has_no_gradient(ranks, options):
    ranks(slack, 1, options)


def without_derivatives(rank, num_ranks, group):
    """Calls without a derivative are refused, on all ranks; no gradient is silently left out."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    x, idx, weights = layer_inputs(rank, num_ranks, 6)
    router = weights.clone().requires_grad_()
    plan, weighed = exchange.plan(idx), exchange.plan(idx, router)
    rows = weft.dispatch(plan, x).rows
    other = rows.clone().requires_grad_()
    one = torch.ones(1, requires_grad=True)
    found = []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (
            lambda: weft.dispatch(plan, dual if rank == 1 else x),
            lambda: weft.plan_and_dispatch(exchange, idx, dual if rank == 1 else x),
            lambda: weft.combine(plan, forward_ad.make_dual(rows, rows) if rank == 1 else rows),
            lambda: weft.combine(plan, rows, scale="source", source_weights=router),
            lambda: weft.combine(weighed, rows, scale="plan"),
            lambda: weft.combine(plan, other, out=torch.empty_like(x)),
            lambda: weft.dispatch(plan, x.bfloat16(), quantise="nvfp4", global_scale=one),
        ):
            with pytest.raises((NotImplementedError, weft.InvalidArgument)) as refused:
                call()
            found.append(str(refused.value))
            assert torch.equal(weft.dispatch(plan, x).rows, rows)
    with torch.no_grad():
        weft.combine(weighed, rows, scale="plan")
    return found


def test_what_has_no_derivative_is_refused_on_all_ranks(ranks):
    for texts in ranks(without_derivatives, 2):
        assert all("no tangents of forward mode" in text for text in texts[:3])
        assert all("has no gradient" in text for text in texts[3:])


def written(rank, num_ranks, group):
    """Autograd knows what calls write to, and refuses a backward that has kept it."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=LOCAL * num_ranks)
    x, idx, _ = layer_inputs(rank, num_ranks, 6)
    plan = exchange.plan(idx)
    rows = weft.dispatch(plan, x).rows
    memory, sums = torch.ones_like(x), torch.zeros(num_ranks, dtype=torch.int64)
    factor = torch.ones_like(x, requires_grad=True)
    product = (factor * memory).sum()
    exchange.combine(plan, rows, out=memory)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    before = sums._version
    with exchange.waits_added(sums):
        exchange.plan(idx)
    assert sums._version > before
    with torch.inference_mode():
        exchange.combine(plan, rows, out=torch.ones_like(x))  # has no version


def test_memory_that_calls_write_to_has_another_version(ranks):
    ranks(written, 2)
