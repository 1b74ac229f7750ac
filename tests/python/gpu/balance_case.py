# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts, for call_cases.py."""

import torch

import weft
from weft.block_products import block_linear
from weft.dispatcher import DispatcherConfig, MoEFlexTokenDispatcher

HIDDEN, WIDE, REPLICAS = 64, 48, 2
WAYS = (("expert_major", "topk"), ("expert_major", "rank"), ("rank_major", "rank"))


def placement_of(num_ranks, local):
    """Placement where each rank has the next one's first expert and the second of the one after it;
    -1 where there are too few ranks."""
    placement = torch.full((num_ranks, REPLICAS), -1, dtype=torch.int32)
    for at in range(num_ranks):
        for slot in range(min(REPLICAS, num_ranks - 1)):
            placement[at, slot] = (at + slot + 1) % num_ranks * local + slot
    return placement


def popular(inputs):
    """Routes most of which go to the first experts."""
    return torch.where(inputs.idx >= 0, inputs.idx * inputs.idx // inputs.num_experts, -1)


def balanced(group, inputs):
    """Plans with replicas of every kind: what they say, and rows that travel by them."""
    exchange = weft.Exchange(
        group,
        hidden=inputs.x.size(1),
        num_experts=inputs.num_experts,
        max_tokens=64,
        device=inputs.device,
    )
    idx, placement = popular(inputs), placement_of(exchange.num_ranks, exchange.num_local_experts)
    made = []

    def move(plan, weights):
        x, w = inputs.x.clone().requires_grad_(), weights.clone().requires_grad_()
        rows, row_weights, _ = weft.dispatch(plan, x, w)
        out = weft.combine(plan, rows * 3).x
        torch.autograd.backward([out, row_weights], [out.detach(), row_weights.detach()])
        load = torch.tensor(plan.load)
        made.extend([plan.placement, plan.routes_per_expert, plan.rows_per_expert, load])
        made.extend([rows, row_weights, out, x.grad, w.grad])

    for balance in (
        REPLICAS,
        weft.Balancing(REPLICAS, min_rows=3, block_rows=4),
        weft.Balancing(1, replica_rows=2),
        weft.Placement(placement),
        weft.Placement(placement, block_rows=4),
    ):
        for layout, order in WAYS:
            plan = exchange.plan(idx, inputs.weights, layout=layout, order=order, balance=balance)
            move(plan, inputs.weights)
            if layout == "expert_major":
                rows = weft.dispatch(plan, inputs.x).rows
                made.append(weft.combine(plan, rows, scale="plan").x)
        plan = exchange.plan(None, inputs.probs, routing_map=inputs.map, balance=balance)
        move(plan, inputs.probs)
        rows = weft.dispatch(plan, inputs.x).rows
        made.append(weft.combine(plan, rows, scale="source", source_weights=inputs.probs).x)
        for budget in (512, 40):
            plan, out = exchange.plan_and_dispatch(
                idx, inputs.x, inputs.weights, row_budget=budget, balance=balance
            )
            is_row = torch.arange(plan.num_rows, device=inputs.device) < plan.num_rows_used
            kept = torch.where(is_row[:, None], out.rows, 0)
            made += [kept, exchange.combine(plan, kept * 3).x, plan.placement, plan.overflow]
    return made


def balanced_layer(group, inputs):
    """A layer whose plan places replicas, with their weights and gradients; numbers are whole where
    sums have an order of the device's own."""
    local = inputs.num_experts // weft.Group.of(group).num_ranks
    exchange = weft.Exchange(
        group, hidden=HIDDEN, num_experts=inputs.num_experts, device=inputs.device
    )
    shapes = [(HIDDEN, WIDE), (WIDE, HIDDEN)]
    balance = weft.Balance(exchange, replicas=REPLICAS, shapes=shapes, dtypes=torch.float32)
    gen = torch.Generator().manual_seed(exchange.rank)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=gen).float().to(inputs.device)

    made = []
    for budget in (None, 512):
        x = whole(inputs.idx.size(0), HIDDEN).requires_grad_()
        weights = [whole(local, *shape).requires_grad_() for shape in shapes]
        plan = exchange.plan(
            popular(inputs),
            order="topk",
            row_budget=budget,
            balance=weft.Balancing(REPLICAS, block_rows=8),
        )
        sizes = plan.rows_per_expert_list

        def experts(rows, first, second, sizes=sizes):
            return block_linear(block_linear(rows, first, sizes, 8).relu(), second, sizes, 8)

        rows = weft.dispatch(plan, x).rows
        is_row = torch.arange(plan.num_rows, device=inputs.device) < sum(sizes)
        rows = torch.where(is_row[:, None], rows, 0)
        out = weft.combine(plan, balance.apply(plan, experts, rows, *weights, wgrad="blocks")).x
        out.sum().backward()
        made += [out, x.grad, plan.placement, *(one.grad for one in weights)]
    return made


class Scaled(torch.nn.Module):
    """Experts that multiply their rows by a row of their own."""

    def __init__(self, num_local, hidden, rank, device):
        super().__init__()
        self.num_local_experts = num_local
        gen = torch.Generator().manual_seed(rank)
        weight = torch.randn(num_local, hidden, generator=gen).to(device, torch.bfloat16)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, rows, counts):
        assert len(counts) == self.num_local_experts == len(self.weight)
        return rows * self.weight.repeat_interleave(counts, 0)


def balanced_dispatcher(group, inputs):
    """Weft's dispatcher with replicas, whose weights it brings."""
    rank, local = group.rank(), inputs.num_experts // group.size()
    config = DispatcherConfig(
        num_moe_experts=inputs.num_experts,
        moe_router_topk=inputs.idx.size(1),
        moe_flex_dispatcher_backend="hybridep",
        moe_balance_replicas=REPLICAS,
        moe_combine_order="topk",
    )
    own = list(range(rank * local, (rank + 1) * local))
    made = MoEFlexTokenDispatcher(local, own, config, group)
    experts = Scaled(local, inputs.x.size(1), rank, inputs.device)
    made.replicate_experts(experts)
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    given = made.token_dispatch(*made.dispatch_preprocess(x, inputs.map, probs))
    rows, counts, row_probs = made.dispatch_postprocess(*given)
    scaled = experts(rows, counts) * row_probs.to(rows.dtype).unsqueeze(1)
    out = made.combine_postprocess(made.token_combine(made.combine_preprocess(scaled)))
    out.backward(out.detach())
    return [rows, counts, row_probs, out, x.grad]


def passed_on(exchange, shapes, weights):
    """Replicas of an expert on all other ranks, which pass its weights on."""
    balance = weft.Balance(
        exchange, replicas=1, shapes=shapes, dtypes=torch.float32, relays="always"
    )
    placement = torch.zeros(exchange.num_ranks, 1, dtype=torch.int32)
    placement[0] = -1
    return balance.push_weights(placement, weights)


def replicas(group, inputs):
    """Numbers are whole where sums have an order of the device's own."""
    local = inputs.num_experts // weft.Group.of(group).num_ranks
    exchange = weft.Exchange(
        group, hidden=HIDDEN, num_experts=inputs.num_experts, device=inputs.device
    )
    num_ranks, rank = exchange.num_ranks, exchange.rank
    placement = placement_of(num_ranks, local)
    shapes = [(HIDDEN, WIDE), (WIDE, HIDDEN)]
    balance = weft.Balance(exchange, replicas=REPLICAS, shapes=shapes, dtypes=torch.float32)
    gen = torch.Generator().manual_seed(rank)
    made = []

    def random(*shape):
        return torch.randn(shape, generator=gen).to(inputs.device)

    weights = [random(local, *shape) for shape in shapes]
    made += [one.clone() for one in balance.push_weights(placement, weights)]
    made += passed_on(exchange, shapes, weights)
    grads = [random(local + REPLICAS, *shape) for shape in shapes]
    balance.reduce_grads(placement, grads)
    made += grads

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=gen).float().to(inputs.device)

    places = local + REPLICAS
    physical = weft.Exchange(
        group, hidden=HIDDEN, num_experts=num_ranks * places, device=inputs.device
    )
    # Half of the tokens go to masters, the others to the places before those, replicas among them.
    there = torch.where(inputs.idx >= 0, inputs.idx // local * places + inputs.idx % local, -1)
    there[1::2] = torch.where(
        there[1::2] >= 0, (there[1::2] + places - 1) % physical.num_experts, -1
    )
    plan = physical.plan(there)
    sizes = plan.rows_per_expert_list
    for wgrad in ("places", "blocks"):
        x = whole(inputs.idx.size(0), HIDDEN).requires_grad_()
        layers = [[whole(local, *shape).requires_grad_() for shape in shapes] for _ in range(2)]
        hidden = x

        def experts(rows, first, second):
            return block_linear(block_linear(rows, first, sizes).relu(), second, sizes)

        for weights in layers:
            rows = weft.dispatch(plan, hidden % 3).rows
            hidden = weft.combine(
                plan, balance.apply(placement, experts, rows, *weights, wgrad=wgrad)
            ).x
        (hidden % 5).sum().backward()
        made += [hidden, x.grad, *(one.grad for weights in layers for one in weights)]
    return made
