# SPDX-License-Identifier: Apache-2.0
"""Ranks of several domains, as several hosts have them: on one machine by smaller domains."""

import pytest
import torch

import weft
from domain_cases import NUM_RANKS, two_domains
from weft.dispatcher import DispatcherGroups
from weft.examples.layer import DISPATCHERS, MoELayer, make_dispatcher

TOKENS, HIDDEN, EXPERTS, TOPK = 37, 16, 8, 3


def whole_numbers(seed, *shape):
    """Sums of them have the same bits in any order."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=gen).float()


def in_two_domains(rank, num_ranks, group, body):
    with two_domains() as group:
        globals()[body](rank, num_ranks, group)


def routed(rank):
    gen = torch.Generator().manual_seed(rank)
    return torch.rand(TOKENS + rank, EXPERTS, generator=gen).topk(TOPK).indices


def crosses_once(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    assert ex.core.transport == "domains" and len(weft.Group.of(group).domains) == 2
    x, idx = whole_numbers(rank, TOKENS + rank, HIDDEN).requires_grad_(), routed(rank)
    plan = weft.plan(ex, idx, pad_multiple=4)
    out = weft.combine(plan, weft.dispatch(plan, x).rows)
    assert torch.equal(out.x, TOPK * x)
    out.x.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, TOPK))
    # One row for each token that any rank of the other domain has an expert for.
    local = EXPERTS // num_ranks
    is_far = (idx // local // 2) != rank // 2
    far_tokens = is_far.any(1).sum().item()
    row = HIDDEN * x.element_size()
    assert plan.core.crossing_bytes(row) == far_tokens * row
    stats = ex.stats()
    assert 0 < stats["crossing_bytes"] < stats["crossing_bytes_by_arrival"]


def layers_agree(rank, num_ranks, group):
    groups = DispatcherGroups(ep=group, expt_tp=None, tp_ep=group)
    found = []
    for kind in DISPATCHERS:
        dispatcher = make_dispatcher(kind, groups, EXPERTS, TOPK)
        layer = MoELayer(dispatcher, HIDDEN, 24, EXPERTS, TOPK)
        layer.reset(seed=3)
        x = whole_numbers(10 + rank, TOKENS, HIDDEN).requires_grad_()
        out = layer(x)
        out.backward(x.detach())
        found.append((out.detach(), x.grad, layer.experts.up.grad))
    for kind, tensors in zip(DISPATCHERS[1:], found[1:]):
        for ours, theirs in zip(tensors, found[0]):
            torch.testing.assert_close(ours, theirs, msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("body", ["crosses_once", "layers_agree"])
def test_two_domains_of_two(ranks, body):
    ranks(in_two_domains, NUM_RANKS, body)
