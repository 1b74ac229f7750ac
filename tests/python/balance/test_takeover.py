# SPDX-License-Identifier: Apache-2.0
"""Replicas and ranks that are lost: those of a placement take over, and the planner's lie on ranks
that are left."""

import os
import signal

import pytest
import torch

import weft
from oracle import HIDDEN, inputs

RANKS, PER_RANK, VICTIM, TOPK = 3, 2, 1, 3
PLACEMENT = [[2, 4], [0, 5], [2, 1]]  # expert 2 of the victim is on both others, 3 nowhere
LOST = {"placed": [3], "planned": [2, 3]}


def balance_of(kind):
    return weft.Placement(PLACEMENT) if kind == "placed" else 2


def experts_here(plan, rank):
    """Expert in each of this rank's places; any number where there is none."""
    return [*range(rank * PER_RANK, (rank + 1) * PER_RANK), *plan.placement[rank].tolist()]


def check_layer(ex, kind, dtype, step, kept_of):
    """A forward and a backward, step(name) before each of two calls. kept_of(plan, idx): which
    routes have given something, which is more than an expert's factor tells."""
    x, idx, weights = inputs(ex.rank, 9 + ex.rank, TOPK, RANKS * PER_RANK)
    idx = idx.to(dtype)
    x.requires_grad_()
    weights.requires_grad_()
    step("plan")
    plan = ex.plan(idx, balance=balance_of(kind))
    step("dispatch")
    rows, row_weights, _ = weft.dispatch(plan, x, weights)
    factors = torch.tensor(experts_here(plan, ex.rank)) + 1.0
    each = factors.repeat_interleave(torch.tensor(plan.core.rows_per_expert)).view(-1, 1)
    out = weft.combine(plan, rows * each * row_weights.view(-1, 1)).x
    kept = kept_of(plan, idx) & (idx >= 0)
    factors = (kept * weights * (idx + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(out, x * factors)
    upstream = inputs(ex.rank, 9 + ex.rank, TOPK, RANKS * PER_RANK, seed=1)[0]
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * factors)
    inner = (x * upstream).sum(1, keepdim=True)
    torch.testing.assert_close(weights.grad, kept * (idx + 1) * inner)
    with torch.no_grad():
        left = (kept * weights).sum(1)
        whole = ex.renormalisation(idx, weights, plan).view(-1) * left
        all_of_it = ((idx >= 0) * weights).sum(1)
        torch.testing.assert_close(whole, torch.where(left > 0, all_of_it, 0.0))
    return plan


def killed(rank, num_ranks, group, kind, name, dtype):
    told = []
    ex = weft.Exchange(
        group,
        hidden=HIDDEN,
        num_experts=RANKS * PER_RANK,
        on_peer_loss="shrink",
        on_loss=told.append,
    )

    def step(now):
        if now == name and rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

    def of_plan(plan, idx):
        return torch.tensor(plan.core.route_ranks).view_as(idx) != VICTIM

    def of_later_plans(_, idx):
        return ~torch.isin(idx, torch.tensor(LOST[kind]))

    check_layer(ex, kind, dtype, lambda _: None, lambda plan, idx: idx >= 0)
    check_layer(ex, kind, dtype, step, of_later_plans if name == "plan" else of_plan)
    assert told == [weft.CallReport(1, [0, 2], [VICTIM], LOST[kind])]
    plan = check_layer(ex, kind, dtype, lambda _: None, of_later_plans)
    assert ex.report() == weft.CallReport(1, [0, 2], [], LOST[kind])
    assert plan.load.mean == sum(plan.routes_per_expert) / 2
    if kind == "placed":
        assert plan.placement.tolist() == PLACEMENT
        assert plan.routes_per_expert[2] > 0 == plan.routes_per_expert[3]
    else:
        assert plan.placement[VICTIM].tolist() == [-1, -1]
        assert not torch.isin(plan.placement, torch.tensor(LOST[kind])).any()
        assert plan.load.busiest <= plan.load.unbalanced


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["plan", "dispatch"])
@pytest.mark.parametrize("kind", ["placed", "planned"])
def test_replicas_when_a_rank_is_killed(ranks, kind, name, dtype):
    ranks(killed, RANKS, kind, name, dtype, dying=(VICTIM,))
