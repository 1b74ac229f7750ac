# SPDX-License-Identifier: Apache-2.0
"""A `Balance` on GPUs and its exchange go on without a rank that is killed, and take a new one."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import weft
from oracle import gather
from replica_steps import LOCAL, PLACEMENT, RANKS, SHAPE, VICTIM, check_step, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def exchange_of(group, device):
    sizes = {"hidden": 16, "num_experts": RANKS * LOCAL, "max_tokens": 32}
    return weft.Exchange(group, device=device, on_peer_loss="shrink", **sizes)


def balance_of(ex, invitation=None):
    given = {"dtypes": torch.float32, "on_peer_loss": "shrink", "invitation": invitation}
    return weft.Balance(ex, replicas=2, shapes=[SHAPE], **given)


def until_lost(call, device):
    with pytest.raises(weft.RanksLost, match=f"rank {VICTIM} is lost"):
        while True:
            call()
            torch.cuda.synchronize(device)


_kept = {}  # of this process, from one call of a test to the next


def killed(rank, num_ranks, group):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    ex = exchange_of(group, device)
    balance = balance_of(ex)
    _kept["made"] = ex, balance
    check_step(balance, rank, 1, [0, 1, 2])
    dist.barrier(group)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)

    def plan():
        ex.plan(torch.zeros(4, 1, dtype=torch.int64, device=device))

    def push():
        balance.push_weights(PLACEMENT, [tensors(rank, 2, LOCAL, device)])

    for call in (plan, push) if rank == 0 else (push, plan):  # either first
        until_lost(call, device)
    for seed in (3, 5):
        check_step(balance, rank, seed, [0, 2])
    plan()
    assert ex.alive() == [0, 2]


def coming_back(rank, num_ranks, group):
    ex, balance = _kept.pop("made", (None, None))
    told = (ex.invitation(), balance.invitation()) if rank == 0 else None
    to_exchange, to_balance = gather(group, told)[0]
    if rank == VICTIM:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        ex = exchange_of(weft.Group.rejoin(VICTIM, to_exchange), device)
        balance = balance_of(ex, to_balance)
    else:
        ex.readmit([VICTIM])
        balance.readmit([VICTIM])
    for seed in (7, 9):
        check_step(balance, rank, seed, [0, 1, 2])
    assert ex.alive() == [0, 1, 2]


def test_a_rank_is_killed_and_a_new_process_takes_its_place(ranks):
    ranks(killed, RANKS, dying=(VICTIM,))
    ranks(coming_back, RANKS)
