# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of an MoE layer with replicas have the bits of those without."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import weft
from weft import _core
from weft.block_products import block_linear

HIDDEN, WIDE, TOKENS, TOPK, LOCAL, REPLICAS = 32, 48, 90, 2, 2, 2
STEPS = 3


def random(gen, *shape):
    return torch.randn(shape, generator=gen) * 0.3


def row_linear(rows, weight, counts):
    """A row of it does not depend on its neighbours, as one of a matrix product may."""
    blocks = rows.split(counts)
    return torch.cat([(b[:, :, None] * weight[e]).sum(1) for e, b in enumerate(blocks)])


class Layer:
    """The first experts are popular. mode "plain": no replicas. block_rows 0: `row_linear`. again:
    `use_reentrant` of a checkpoint around the experts, None: there is none."""

    def __init__(self, rank, num_ranks, group, mode, block_rows, again):
        self.rank, self.group, self.mode, self.block_rows = rank, group, mode, block_rows
        self.again = again
        self.bound = None  # of the error of the last weight's gradient, any order of sums
        self.num_experts = num_ranks * LOCAL
        sizes = {"hidden": HIDDEN, "max_tokens": TOKENS}
        self.exchange = weft.Exchange(group, num_experts=self.num_experts, **sizes)
        # Of the experts of the two ranks before, wherever these are others.
        self.ring = [
            [
                (at - 1 - slot) % num_ranks * LOCAL if slot + 1 < num_ranks else -1
                for slot in range(REPLICAS)
            ]
            for at in range(num_ranks)
        ]
        if mode != "plain":
            shapes = [(HIDDEN, WIDE), (WIDE, HIDDEN)]
            self.balance = weft.Balance(
                self.exchange, replicas=REPLICAS, shapes=shapes, dtypes=torch.float32
            )
        gen = torch.Generator().manual_seed(rank)
        weights = [random(gen, LOCAL, *shape) for shape in ((HIDDEN, WIDE), (WIDE, HIDDEN))]
        self.parameters = [
            Parameter(one) for one in (random(gen, HIDDEN, self.num_experts), *weights)
        ]
        self.moved = 0  # rows that went to replicas

    def __call__(self, x):
        router, *weights = self.parameters
        logits = x @ router - 0.5 * torch.arange(self.num_experts)
        scores, idx = logits.softmax(-1).topk(TOPK)
        balance = {
            "plain": 0,
            "places": REPLICAS,
            "blocks": weft.Balancing(REPLICAS, block_rows=self.block_rows),
            "placed": weft.Placement(self.ring, block_rows=max(self.block_rows, 1)),
        }[self.mode]
        plan = self.exchange.plan(idx, order="topk", balance=balance)
        assert _core.Plan.from_json(plan.core.to_json()) == plan.core
        rows, row_weights, _ = weft.dispatch(plan, x, scores)
        counts = plan.rows_per_expert_list
        self.moved += sum(counts[LOCAL:])

        def experts(rows, first, second):
            if self.block_rows:
                wide = block_linear(rows, first, counts, self.block_rows).relu()
                return block_linear(wide, second, counts, self.block_rows)
            wide = row_linear(rows, first, counts).relu()
            made = row_linear(wide, second, counts)
            if self.mode == "plain":
                made.register_hook(lambda grad: self._bound_by(wide.detach(), grad, counts))
            return made

        def compute(*given):
            if self.again is None:
                return experts(*given)
            return checkpoint(experts, *given, use_reentrant=self.again)

        if self.mode == "plain":
            made = experts(rows, *weights)
        else:
            wgrad = "places" if self.mode == "places" else "blocks"
            made = self.balance.apply(plan, compute, rows, *weights, wgrad=wgrad)
        return weft.combine(plan, made * row_weights).x

    def _bound_by(self, rows, grad, counts):
        """(n + R) * 2^-24 * the sum of magnitudes, for n rows and R replicas of an expert."""
        pairs = zip(rows.double().abs().split(counts), grad.double().abs().split(counts))
        most = dist.get_world_size(self.group)
        self.bound = torch.stack([(len(x) + most) * 2.0**-24 * (x.T @ dy) for x, dy in pairs])


def trained(rank, num_ranks, group, mode, block_rows, steps=STEPS, again=None):
    """Of each step the output and all gradients; the parameters; rows of replicas; `bound`."""
    layer = Layer(rank, num_ranks, group, mode, block_rows, again)
    optimizer = torch.optim.Adam(layer.parameters, lr=1e-2)
    gen = torch.Generator().manual_seed(100 + rank)
    found = []
    for _ in range(steps):
        x, grad = (random(gen, TOKENS, HIDDEN) for _ in range(2))
        x.requires_grad_()
        optimizer.zero_grad()
        out = layer(x)
        out.backward(grad)
        found.append([out.detach(), x.grad, *(one.grad.clone() for one in layer.parameters)])
        optimizer.step()
    return found, [one.detach() for one in layer.parameters], layer.moved, layer.bound


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("num_ranks", "block_rows"), [(2, 16), (4, 32), (8, 128)])
def test_three_steps_have_the_bits_of_those_without_replicas(ranks, num_ranks, block_rows):
    plain = ranks(trained, num_ranks, "plain", block_rows)
    blocks = ranks(trained, num_ranks, "blocks", block_rows)
    for (want, parameters, *_), (found, others, *_) in zip(plain, blocks, strict=True):
        for step in range(STEPS):
            assert same(found[step], want[step])
        assert same(parameters, others)
    assert sum(moved for *_, moved, _ in blocks) > block_rows


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_that_stay_take_blocks_too(ranks, num_ranks):
    plain = ranks(trained, num_ranks, "plain", 16, 1)
    placed = ranks(trained, num_ranks, "placed", 16, 1)
    for ((want,), *_), ((found,), *_) in zip(plain, placed, strict=True):
        assert same(found, want)
    assert sum(moved for *_, moved, _ in placed) >= 16


@pytest.mark.parametrize("again", [False, True])
def test_checkpointed_experts_have_the_same_bits(ranks, again):
    plain = ranks(trained, 2, "plain", 16, 1)
    blocks = ranks(trained, 2, "blocks", 16, 1, again)
    for ((want,), *_), ((found,), *_) in zip(plain, blocks, strict=True):
        assert same(found, want)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_any_replicas_give_the_same_outputs_and_input_gradients(ranks, num_ranks):
    plain = ranks(trained, num_ranks, "plain", 0, 1)
    places, again = (ranks(trained, num_ranks, "places", 0, 1) for _ in range(2))
    for ((want,), *_, bound), ((found,), *_) in zip(plain, places, strict=True):
        assert same(found[:3], want[:3])  # the router's too
        torch.testing.assert_close(found[3], want[3])
        assert ((found[4].double() - want[4].double()).abs() <= 2 * bound).all()
    assert not all(same(found[0], want[0]) for (found, *_), (want, *_) in zip(places, plain))
    for (one, *_), (other, *_) in zip(places, again, strict=True):
        assert same(one[0], other[0])
