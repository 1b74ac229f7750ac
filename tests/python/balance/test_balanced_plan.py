# SPDX-License-Identifier: Apache-2.0
"""Plans with replicas of popular experts: with order="topk" the bits are those of plans without,
forward and backward, and ranks are more even."""

import pytest
import torch

import weft

HIDDEN, EXPERTS, TOPK, TOKENS = 32, 16, 4, 96


def whole(skew):
    """Tokens, choices with holes, weights and gradients that all ranks share out. skew: how much
    more popular experts of low numbers are."""
    gen = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=gen).to(torch.bfloat16) for _ in range(2))
    popularity = -skew * torch.arange(EXPERTS)
    scores = popularity + torch.rand(TOKENS, EXPERTS, generator=gen).log().neg().log().neg()
    weights, idx = scores.topk(TOPK)
    idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
    return x, idx, weights.sigmoid(), grad


def experts_of(plan, rank):
    """The expert of each block of this rank's rows."""
    own = plan.num_experts // len(plan.received_arrivals)
    replicas = plan.placement[rank].tolist() if plan.num_replicas else []
    return [*range(rank * own, (rank + 1) * own), *replicas]


def blocks_of(plan, rows):
    begin, count = plan.expert_begin.tolist(), plan.rows_per_expert.tolist()
    return [rows[b : b + n] for b, n in zip(begin, count, strict=True)]


def computed(plan, rank, rows):
    """Results of the experts for rows of expert_major or expert_strided."""
    made = torch.zeros_like(rows)
    outs = []
    for expert, block in zip(experts_of(plan, rank), blocks_of(plan, rows), strict=True):
        assert expert >= 0 or len(block) == 0
        outs.append(block * block * torch.tensor(1 + 0.3 * expert).to(torch.bfloat16))
    places = [
        torch.arange(b, b + len(out))
        for b, out in zip(plan.expert_begin.tolist(), outs, strict=True)
    ]
    return made.index_copy(0, torch.cat(places), torch.cat(outs))


def share_of(rank, num_ranks, tensors):
    share = slice(TOKENS * rank // num_ranks, TOKENS * (rank + 1) // num_ranks)
    return [tensor[share].clone() for tensor in tensors]


def as_map(idx, weights):
    """The routing as a map and weights beside it."""
    routing_map = torch.zeros(len(idx), EXPERTS + 1, dtype=torch.bool)
    spread = torch.zeros(len(idx), EXPERTS + 1)
    column = idx.masked_fill(idx < 0, EXPERTS)
    routing_map.scatter_(1, column, True)
    spread.scatter_(1, column, weights)
    return routing_map[:, :EXPERTS].contiguous(), spread[:, :EXPERTS].contiguous()


def layer(rank, num_ranks, group, skew, how, options):
    """One rank's share of the output and of gradients, and what its plan says of the balance."""
    x, idx, weights, grad = share_of(rank, num_ranks, whole(skew))
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS, max_topk=TOPK)
    routing = {"topk_idx": idx}
    if how == "map":
        routing_map, weights = as_map(idx, weights)
        routing = {"topk_idx": None, "routing_map": routing_map}
    x.requires_grad_()
    weights.requires_grad_()
    if how == "together":
        options = {**options, "plan_weights": weights.detach()}
        plan, (rows, row_weights, _) = weft.plan_and_dispatch(exchange, idx, x, weights, **options)
    else:
        plan = exchange.plan(weights=weights.detach(), **routing, **options)
        rows, row_weights, _ = weft.dispatch(plan, x, weights)
    made = computed(plan, rank, rows)
    out = weft.combine(plan, (made * row_weights).to(torch.bfloat16)).x
    out.backward(grad)
    found = [out.detach(), x.grad, weights.grad]
    found.append(weft.combine(plan, made.detach(), scale="plan").x)
    by_source = weft.combine(plan, made.detach(), scale="source", source_weights=weights.detach()).x
    assert torch.equal(by_source, found[-1])
    return found, plan.load, plan.placement, plan.routes_per_expert


def of_all(ranks, num_ranks, *args):
    shares, loads, placements, counts = zip(*ranks(layer, num_ranks, *args), strict=True)
    assert all(load == loads[0] for load in loads)
    assert all(torch.equal(one, placements[0]) for one in placements)
    _, idx, _, _ = whole(args[0])
    assert torch.equal(counts[0], idx[idx >= 0].bincount(minlength=EXPERTS))
    return [torch.cat(tensors) for tensors in zip(*shares, strict=True)], loads[0], placements[0]


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("skew", [0.0, 0.4])
@pytest.mark.parametrize("how", ["apart", "together", "map"])
def test_bits_are_those_of_a_plan_without_replicas(ranks, how, skew):
    alone, _, _ = of_all(ranks, 1, skew, how, {"order": "topk"})
    for num_ranks in (2, 4, 8):
        options = {"order": "topk", "balance": 2, "pad_multiple": 4}
        balanced, load, placement = of_all(ranks, num_ranks, skew, how, options)
        assert same_bits(balanced, alone)
        assert placement.shape == (num_ranks, 2)
        assert load.busiest <= load.unbalanced
        assert load.of_mean < 1.1


def test_strided_blocks_count_the_places_of_replicas(ranks):
    for stride in (0, TOKENS):
        plain = {"order": "topk", "layout": "expert_strided", "expert_stride": stride}
        alone, _, _ = of_all(ranks, 4, 0.4, "together", {"order": "topk"})
        balanced, _, _ = of_all(ranks, 4, 0.4, "together", {**plain, "balance": 1})
        assert same_bits(balanced, alone)


def rows_by_rank(rank, num_ranks, group, balance):
    """With rank_major: the rows are those of the tokens, and a budget drops the last of them."""
    x, idx, _, _ = share_of(rank, num_ranks, whole(0.4))
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    plan = exchange.plan(idx, layout="rank_major", balance=balance)
    rows, _, _ = weft.dispatch(plan, x)
    summed = weft.combine(plan, torch.ones_like(rows)).x
    assert exchange.plan(idx, layout="rank_major", balance=balance, row_budget=3).overflow.item()
    # How many ranks a token goes to.
    return plan.num_rows, sum(plan.received_arrivals), summed[:, 0].sum().item()


def test_rows_by_rank_are_counted_after_balancing(ranks):
    for balance in (0, 2):
        numbers = ranks(rows_by_rank, 4, balance)
        assert all(rows == received for rows, received, _ in numbers)
        assert sum(rows for rows, _, _ in numbers) == sum(arrivals for _, _, arrivals in numbers)


def budgets(rank, num_ranks, group):
    x, idx, _, _ = share_of(rank, num_ranks, whole(0.4))
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    local = exchange.num_local_experts
    enough = weft.balanced_rows(len(x), TOPK, local, 2, pad_multiple=8)
    fits = exchange.plan(idx, row_budget=enough, pad_multiple=8, balance=2)
    assert fits.load.busiest <= weft.balanced_rows(len(x), TOPK, local, 2)
    assert fits.num_rows == enough
    tight = fits.load.busiest - 1
    drops = exchange.plan(idx, row_budget=tight, balance=2)
    unbalanced = exchange.plan(idx, row_budget=enough, pad_multiple=8)
    with pytest.raises(weft.InvalidArgument, match="row_budget"):
        exchange.plan(idx, row_budget=tight, balance=2, overflow="error")
    return fits.overflow.item(), drops.overflow.item(), unbalanced.overflow.item()


def test_the_mean_and_padding_are_a_sufficient_budget(ranks):
    numbers = ranks(budgets, 4)
    fits, drops, unbalanced = (list(flags) for flags in zip(*numbers, strict=True))
    assert not any(fits)
    assert any(drops)
    assert any(unbalanced)


def fixed_places(rank, num_ranks, group, path):
    x, idx, weights, _ = share_of(rank, num_ranks, whole(0.4))
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS, max_topk=TOPK)
    popular = exchange.plan(idx).routes_per_expert
    placement = weft.Placement.from_counts(torch.stack([popular, popular]), num_ranks, 2)
    placement.check(EXPERTS)
    plan = exchange.plan(idx, weights, balance=placement, order="topk")
    assert torch.equal(plan.placement, placement.replicas)
    planned = exchange.plan(idx, weights, balance=weft.Balancing(2, min_rows=5))
    same = weft._core.Plan.from_json(plan.core.to_json())
    assert same == plan.core
    assert same.placement == plan.core.placement
    assert same.load == plan.core.load
    elsewhere = weft.Placement([[(rank + 2) * EXPERTS // num_ranks % EXPERTS] for rank in range(4)])
    useless = exchange.plan(idx, balance=elsewhere)
    out = weft.combine(plan, computed(plan, rank, exchange.dispatch(plan, x).rows), scale="plan").x
    plain = exchange.plan(idx, weights, order="topk")
    expected = computed(plain, rank, exchange.dispatch(plain, x).rows)
    assert torch.equal(out, weft.combine(plain, expected, scale="plan").x)
    return plan.load, planned.load, useless.load


def test_replicas_may_lie_where_the_caller_says(ranks):
    fixed, planned, useless = ranks(fixed_places, 4, None)[0]
    assert fixed.of_mean < 1.05
    assert planned.of_mean < 1.1
    assert fixed.unbalanced == useless.unbalanced
    assert fixed.busiest <= useless.busiest <= useless.unbalanced


def costs(rank, num_ranks, group):
    x, idx, _, _ = share_of(rank, num_ranks, whole(0.4))
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    free, cheap, dear = (
        exchange.plan(idx, order="topk", balance=weft.Balancing(2, replica_rows=cost))
        for cost in (0, 1, TOKENS * TOPK)
    )
    assert weft._core.Plan.from_json(dear.core.to_json()).load == dear.core.load
    weft.dispatch(dear, x)
    return [(plan.load, plan.placement.tolist()) for plan in (free, cheap, dear)]


def test_replicas_that_cost_more_than_they_spare_are_left_out(ranks):
    first, *others = ranks(costs, 4)
    assert all(one == first for one in others)
    (free, placement), (cheap, other), (dear, none) = first
    assert placement == other and free == cheap and not cheap.is_forgone
    assert none == [[-1, -1]] * 4
    assert dear.is_forgone and dear.busiest == dear.unbalanced and dear.if_free == free.busiest


def refusals(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    x, idx, _, _ = share_of(rank, num_ranks, whole(0.4))
    texts = []
    for balance in (
        rank + 1,
        weft.Balancing(1, min_rows=1 + rank),
        weft.Placement([[8 + rank], [rank]]),
        17,
        weft.Balancing(1, min_rows=0),
        weft.Placement([[0], [1]]),
        weft.Placement([[8, 8], [-1, -1]]),
        weft.Placement([[8]]),
        weft.Placement([[16], [0]]),
        weft.Balancing(1, replica_rows=5 + rank),
        weft.Balancing(1, replica_rows=-1),
        "two" if rank == 1 else 2,
    ):
        with pytest.raises(weft.InvalidArgument) as refused:
            exchange.plan(idx, balance=balance)
        texts.append(str(refused.value))
    weft.dispatch(exchange.plan(idx, balance=1), x)  # still usable
    return texts


def test_every_rank_refuses_what_cannot_be_balanced(ranks):
    first, _ = ranks(refusals, 2)
    for text, expected in zip(
        first,
        (
            "replicas = 1 here and 2 on rank 1",
            "min_rows of a replica = 1 here and 2 on rank 1",
            "checksum of the placement",
            "replicas = 17 (0 to 16)",
            "min_rows = 0 of a replica",
            "placement[0, 0] = 0 lies there anyway",
            "placement[0, 1] = 8 is there twice",
            "the placement has 1 entries (expected 2 ranks x 1 replicas)",
            "placement[0, 0] = 16 is no expert",
            "checksum of the placement and replica_rows",
            "replica_rows = -1 of a replica (0 to 2147483647)",
            "rank 1 refused the call: balance is a str",
        ),
        strict=True,
    ):
        assert expected in text


def test_a_placement_comes_from_a_routing_file():
    file = "bench/routing/king_james.wrt"
    placement = weft.Placement.from_routing_file(file, 8, 2)
    placement.check(128)
    assert placement.replicas.shape == (8, 2)
    assert (placement.replicas >= 0).any()
    with pytest.raises(weft.Error, match="read routing"):
        weft.Placement.from_routing_file("nowhere.wrt", 8, 2)
