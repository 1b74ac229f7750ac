# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts, for test_same_as_cpu.py."""

import torch

import weft
from weft.block_products import block_linear

HIDDEN, WIDE, REPLICAS = 64, 48, 2


def replicas(group, inputs):
    """Of each rank's first two experts on the ranks after it; numbers are whole where sums have an
    order of the device's own."""
    local = inputs.num_experts // weft.Group.of(group).num_ranks
    exchange = weft.Exchange(
        group, hidden=HIDDEN, num_experts=inputs.num_experts, device=inputs.device
    )
    num_ranks, rank = exchange.num_ranks, exchange.rank
    placement = torch.full((num_ranks, REPLICAS), -1, dtype=torch.int32)
    for at in range(num_ranks):
        for slot in range(min(REPLICAS, num_ranks - 1)):
            placement[at, slot] = (at + slot + 1) % num_ranks * local + slot
    shapes = [(HIDDEN, WIDE), (WIDE, HIDDEN)]
    balance = weft.Balance(exchange, replicas=REPLICAS, shapes=shapes, dtypes=torch.float32)
    gen = torch.Generator().manual_seed(rank)
    made = []

    def random(*shape):
        return torch.randn(shape, generator=gen).to(inputs.device)

    weights = [random(local, *shape) for shape in shapes]
    made += [one.clone() for one in balance.push_weights(placement, weights)]
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
