# SPDX-License-Identifier: Apache-2.0
"""A `Balance` that goes on without a rank that is killed: weights and gradients of those left."""

import os
import signal

import pytest
import torch

import weft
from oracle import gather
from replica_steps import LOCAL, PLACEMENT, RANKS, SHAPE, VICTIM, check_step, tensors

_kept = {}  # of this process, from one call of a test to the next


def exchange_of(group):
    return weft.Exchange(group, hidden=16, num_experts=RANKS * LOCAL, on_peer_loss="shrink")


def balance_of(ex, invitation=None, shape=SHAPE):
    given = {"dtypes": torch.float32, "on_peer_loss": "shrink", "invitation": invitation}
    return weft.Balance(ex, replicas=2, shapes=[shape], **given)


def rejoined(to_exchange, to_balance):
    """Returns the exchange and balance of a new process in the victim's place."""
    ex = exchange_of(weft.Group.rejoin(VICTIM, to_exchange))
    with pytest.raises(
        weft.InvalidArgument, match=r"\(40, 3\).* here and .*\(3, 40\).* in the inv"
    ):
        balance_of(ex, to_balance, SHAPE[::-1])
    return ex, balance_of(ex, to_balance)


def killed(rank, num_ranks, group, name):
    ex = exchange_of(group)
    balance = balance_of(ex)
    _kept["made"] = ex, balance
    rows, weights = torch.ones(4, 3), tensors(rank, 0, LOCAL).requires_grad_()
    _kept["before"] = balance.apply(PLACEMENT, lambda x, w: x @ w[0], rows, weights)

    def step(now):
        if now == name and rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

    everyone, rest = [0, 1, 2], [0, 2]
    check_step(balance, rank, 1, everyone)
    if name == "elsewhere":  # the balance does not hear of it
        step(name)
        ex.plan(torch.empty(0, 1, dtype=torch.int64))
        return
    push = rest if name == "push" else everyone
    check_step(balance, rank, 3, push, rest, step)
    check_step(balance, rank, 5, rest)


@pytest.mark.parametrize("name", ["push", "reduce"])
def test_weights_and_gradients_when_a_rank_is_killed(ranks, name):
    ranks(killed, RANKS, name, dying=(VICTIM,))


def coming_back(rank, num_ranks, group):
    ex, balance = _kept.pop("made", (None, None))
    told = (ex.invitation(), balance.invitation()) if rank == 0 else None
    invitation = gather(group, told)[0]
    if rank == VICTIM:
        ex, balance = rejoined(*invitation)
    else:
        ex.plan(torch.empty(0, 1, dtype=torch.int64))  # it may be lost to the balance alone
        ex.readmit([VICTIM])
        balance.readmit([VICTIM])
        with pytest.raises(weft.InvalidArgument, match="between forward and backward"):
            _kept.pop("before").sum().backward()
    everyone = [0, 1, 2]
    for seed in (7, 9):
        check_step(balance, rank, seed, everyone)
    assert ex.alive() == everyone


@pytest.mark.parametrize("name", ["push", "elsewhere"])
def test_a_new_process_takes_the_place_of_a_killed_rank(ranks, name):
    ranks(killed, RANKS, name, dying=(VICTIM,))
    ranks(coming_back, RANKS)


def blocks(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=16, num_experts=RANKS * LOCAL, on_peer_loss="shrink")
    balance = weft.Balance(ex, replicas=2, shapes=[SHAPE], on_peer_loss="shrink")
    weights = torch.zeros(LOCAL, *SHAPE, dtype=torch.bfloat16)
    with pytest.raises(weft.InvalidArgument, match='wgrad = "blocks" needs all ranks'):
        balance.lend(PLACEMENT, torch.zeros(1, 16), weights, wgrad="blocks")


def test_sums_from_rank_to_rank_are_refused(ranks):
    ranks(blocks, RANKS)
