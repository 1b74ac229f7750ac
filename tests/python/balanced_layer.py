# SPDX-License-Identifier: Apache-2.0
"""A small MoE layer that is trained for some steps, with replicas and without, on CPUs or GPUs."""

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

    def __init__(self, rank, num_ranks, group, mode, block_rows, again, device):
        self.rank, self.group, self.mode, self.block_rows = rank, group, mode, block_rows
        self.again, self.device = again, device
        self.bound = None  # of the error of the last weight's gradient, any order of sums
        self.num_experts = num_ranks * LOCAL
        sizes = {"hidden": HIDDEN, "max_tokens": TOKENS, "device": device}
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
            Parameter(one.to(device)) for one in (random(gen, HIDDEN, self.num_experts), *weights)
        ]
        self.moved = 0  # rows that went to replicas

    def __call__(self, x):
        router, *weights = self.parameters
        logits = x @ router - 0.5 * torch.arange(self.num_experts, device=self.device)
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


def trained(rank, num_ranks, group, mode, block_rows, steps=STEPS, again=None, on_gpus=False):
    """On CPU tensors: of each step the output and all gradients; the parameters; rows of replicas;
    `bound`."""
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", rank % torch.cuda.device_count())
    layer = Layer(rank, num_ranks, group, mode, block_rows, again, device)
    optimizer = torch.optim.Adam(layer.parameters, lr=1e-2)
    gen = torch.Generator().manual_seed(100 + rank)
    found = []
    for _ in range(steps):
        x, grad = (random(gen, TOKENS, HIDDEN).to(device) for _ in range(2))
        x.requires_grad_()
        optimizer.zero_grad()
        out = layer(x)
        out.backward(grad)
        found.append([one.cpu() for one in (out.detach(), x.grad)])
        found[-1] += [one.grad.cpu().clone() for one in layer.parameters]
        optimizer.step()
    parameters = [one.detach().cpu() for one in layer.parameters]
    return found, parameters, layer.moved, None if layer.bound is None else layer.bound.cpu()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_steps(plain, blocks, block_rows):
    """Checks that `trained` comes to the same with replicas of blocks as without, on all ranks."""
    for (want, parameters, *_), (found, others, *_) in zip(plain, blocks, strict=True):
        for step in range(STEPS):
            assert same(found[step], want[step])
        assert same(parameters, others)
    assert sum(moved for *_, moved, _ in blocks) > block_rows
