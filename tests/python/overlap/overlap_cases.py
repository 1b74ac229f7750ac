# SPDX-License-Identifier: Apache-2.0
"""A small model of dense and MoE layers, its micro-batches, and three ways to train it."""

from __future__ import annotations

import torch
from torch import nn

from weft.config import OverlapModelConfig
from weft.dispatcher import DispatcherGroups
from weft.examples.layer import MoELayer, make_dispatcher
from weft.overlap import (
    DelayedExperts,
    DelayedLinear,
    ModelChunk,
    TransformerLayer,
    combined_1f1b_schedule_for_no_pipelining,
    sequential_schedule_for_no_pipelining,
)
from weft.overlap.wgrad import delayed_modules

E, H, K, VOCABULARY, SEQUENCE, BATCH = 4, 16, 2, 23, 5, 3


class Attention(nn.Module):
    """A norm and causal attention of one head. x [S, B, H]."""

    def __init__(self, delay: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.qkv = DelayedLinear(H, 3 * H, delay_wgrad_compute=delay)
        self.out = DelayedLinear(H, H, bias=False, delay_wgrad_compute=delay)

    def forward(self, x, mask=None):
        q, k, v = (t.transpose(0, 1) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        scores = q @ k.transpose(1, 2) / H**0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(0, 1))


class Mlp(nn.Module):
    def __init__(self, delay: bool) -> None:
        super().__init__()
        self.up = DelayedLinear(H, 2 * H, delay_wgrad_compute=delay)
        self.down = DelayedLinear(2 * H, H, delay_wgrad_compute=delay)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, H)
        self.positions = nn.Embedding(SEQUENCE, H)

    def forward(self, input_ids, position_ids):
        return self.tokens(input_ids) + self.positions(position_ids)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H, VOCABULARY)

    def forward(self, hidden, labels, loss_mask):
        logits = self.project(hidden)
        if labels is None:
            return logits
        losses = nn.functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="none"
        )
        return losses.sum() if loss_mask is None else (losses * loss_mask.reshape(-1)).sum()


def model(
    group,
    kinds="dm",
    *,
    dispatcher="alltoall",
    num_experts=E,
    shared=False,
    delay=False,
    recompute=(),
    seed=0,
    **config,
):
    """kinds: one letter for each layer, "d" dense or "m" MoE. Weights depend on `seed` alone."""
    torch.manual_seed(seed)
    groups = DispatcherGroups(group, None, group)

    def layer(kind):
        attention = Attention(delay)
        norm = nn.LayerNorm(H)
        pieces = [name for name in recompute if name != "moe_act"]
        if kind == "d":
            return TransformerLayer(
                attention, mlp=Mlp(delay), pre_mlp_norm=norm, recompute_modules=pieces
            )
        made = make_dispatcher(dispatcher, groups, num_experts, K)
        moe = MoELayer(made, H, 2 * H, num_experts, K)
        moe.experts = DelayedExperts(
            made.num_local_experts,
            H,
            2 * H,
            delay_wgrad_compute=delay,
            recompute_activation="moe_act" in recompute,
        )
        moe.reset(seed)
        return TransformerLayer(
            attention,
            moe=moe,
            pre_mlp_norm=norm,
            shared_experts=Mlp(delay) if shared else None,
            recompute_modules=pieces,
        )

    return ModelChunk(
        [layer(kind) for kind in kinds],
        embedding=Embedding(),
        output_layer=Loss(),
        final_norm=nn.LayerNorm(H),
        config=OverlapModelConfig(
            delay_wgrad_compute=delay, recompute_modules=list(recompute) or None, **config
        ),
    )


def batch(rank, i):
    """Arguments of micro-batch i of this rank."""
    maker = torch.Generator().manual_seed(1000 * rank + i)
    ids = torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=maker)
    labels = torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=maker)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(SEQUENCE)[:, None].expand(SEQUENCE, BATCH),
        "attention_mask": torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1),
        "labels": labels,
        "loss_mask": (torch.rand(SEQUENCE, BATCH, generator=maker) > 0.2).float(),
    }


def plain(made, batches, scale):
    """The model as a module, one backward after the other."""
    losses = []
    for arguments in batches:
        loss = made(**arguments)
        loss.backward(torch.full_like(loss, scale))
        for module in delayed_modules([made]):
            module.backward_dw()
        losses.append(loss.detach())
    return losses


def _scheduled(schedule):
    def way(made, batches, scale):
        return schedule(
            lambda i: made.build_schedule_plan(**batches[i], name=f"m{i}"),
            len(batches),
            output_grad=lambda out: torch.full_like(out, scale),
        )

    return way


overlapped = _scheduled(combined_1f1b_schedule_for_no_pipelining)
sequential = _scheduled(sequential_schedule_for_no_pipelining)


def train(made, way, rank, num_batches, steps=3):
    """Three steps of SGD. Every loss, every gradient and every weight of every step, by name."""
    optimiser = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    seen = {}
    for step in range(steps):
        optimiser.zero_grad()
        batches = [batch(rank, 10 * step + i) for i in range(num_batches)]
        for i, loss in enumerate(way(made, batches, 0.5)):
            seen[f"{step} loss {i}"] = loss
        for name, weight in made.named_parameters():
            assert weight.grad is not None, f"{name} has no gradient"
            seen[f"{step} grad {name}"] = weight.grad.clone()
        optimiser.step()
        for name, weight in made.named_parameters():
            seen[f"{step} weight {name}"] = weight.detach().clone()
    return seen


def assert_same_bits(seen, expected):
    assert seen.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(seen[name], expected[name])]
    assert not different, f"{len(different)} of {len(expected)}, first {different[:3]}"
    assert any(value.abs().sum() > 0 for name, value in expected.items() if "grad" in name)
