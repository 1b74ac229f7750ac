# SPDX-License-Identifier: Apache-2.0
"""on_peer_loss="shrink" on GPUs: a rank is killed, the others hear of it and go on."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from call_cases import domains_of

import weft
from weft import _core

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

HIDDEN, TOKENS, TOPK, PER_RANK = 64, 24, 3, 2
VICTIM = 1


def inputs_of(rank, num_ranks, device):
    random = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, PER_RANK * num_ranks, generator=random)
    x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=random).bfloat16()
    return x.to(device), scores.topk(TOPK).indices.to(device)


def sums_of(ex, x, idx):
    """Each token times the number of its routes that were kept."""
    plan = ex.plan(idx, row_budget=TOKENS * TOPK * ex.num_ranks)
    rows = ex.dispatch(plan, x).rows
    return ex.combine(plan, rows).x


def exchange_of(group, num_ranks, device, on_loss=None):
    return weft.Exchange(
        group,
        hidden=HIDDEN,
        num_experts=PER_RANK * num_ranks,
        max_tokens=TOKENS,
        device=device,
        on_peer_loss="shrink",
        on_loss=on_loss,
    )


def lives_on(rank, num_ranks, group, is_replayed, per_domain):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    told = []
    with domains_of(per_domain, num_ranks) as group:
        ex = exchange_of(group, num_ranks, device, told.append)
    x, idx = inputs_of(rank, num_ranks, device)
    run = lambda: sums_of(ex, x, idx)  # noqa: E731
    with torch.cuda.stream(torch.cuda.Stream(device)):
        run()
        torch.cuda.synchronize(device)
        if is_replayed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()

            def run():
                graph.replay()
                return out

        assert torch.equal(run(), x * TOPK)
        torch.cuda.synchronize(device)
        ex.check()
        dist.barrier(group)
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(weft.RanksLost, match=f"rank {VICTIM} is lost"):
            while True:
                run()
                torch.cuda.synchronize(device)
                ex.check()
        alive = [each for each in range(num_ranks) if each != VICTIM]
        lost = list(range(PER_RANK * VICTIM, PER_RANK * (VICTIM + 1)))
        assert ex.report()[:4] == (1, alive, [VICTIM], lost)
        assert told == [ex.report()]
        kept = (idx.div(PER_RANK, rounding_mode="floor") != VICTIM).sum(1, keepdim=True)
        for _ in range(3):
            assert torch.equal(run(), x * kept)
        torch.cuda.synchronize(device)
        ex.check()
        weights = torch.rand(TOKENS, TOPK, device=device)
        factor = ex.renormalisation(idx, weights)
        left = weights.masked_fill(idx.div(PER_RANK, rounding_mode="floor") == VICTIM, 0.0)
        left = left.sum(1, keepdim=True)
        assert torch.allclose(factor * left, weights.sum(1, keepdim=True).where(left != 0, left))
        assert torch.equal(factor, ex.renormalisation(idx, weights, ex.plan(idx)))


def allocates(rank, num_ranks, group):
    """A callback that is told of a loss takes memory of torch, while another thread takes some of
    the exchange, for which torch holds a lock."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    is_told, taken = threading.Event(), []

    def hear(_):
        is_told.set()
        time.sleep(0.5)  # the other thread is in torch's allocator by now
        taken.append(torch.ones(1 << 20, device=device))

    ex = exchange_of(group, num_ranks, device, hear)
    x, idx = inputs_of(rank, num_ranks, device)
    assert torch.equal(sums_of(ex, x, idx), x * TOPK)
    ex._pool_of(ex.core)

    def allocate():
        is_told.wait()
        _core.give_segments(ex.core)
        with torch.cuda.use_mem_pool(ex._pool._pool, device):
            taken.append(torch.ones(64 << 20, device=device))
        _core.give_segments(None)

    dist.barrier(group)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    thread = threading.Thread(target=allocate, daemon=True)
    thread.start()
    with pytest.raises(weft.RanksLost):
        while True:
            sums_of(ex, x, idx)
            torch.cuda.synchronize(device)
            ex.check()
    thread.join()
    assert len(taken) == 2


def test_memory_is_taken_where_a_loss_is_told(ranks):
    ranks(allocates, 3, dying=(VICTIM,))


_kept = {}  # exchanges of this process, from one call of a test to the next


def killed_for_now(rank, num_ranks, group, per_domain):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    with domains_of(per_domain, num_ranks) as group:
        ex = _kept["ex"] = exchange_of(group, num_ranks, device)
    x, idx = inputs_of(rank, num_ranks, device)
    assert torch.equal(sums_of(ex, x, idx), x * TOPK)
    torch.cuda.synchronize(device)
    ex.check()
    dist.barrier(group)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(weft.RanksLost):
        while True:
            sums_of(ex, x, idx)
            torch.cuda.synchronize(device)
            ex.check()


def coming_back(rank, num_ranks, group):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    ex = _kept.pop("ex", None)
    told = [None] * num_ranks
    dist.all_gather_object(told, ex.invitation() if rank == 0 else "", group)
    if rank == VICTIM:
        ex = exchange_of(weft.Group.rejoin(VICTIM, told[0]), num_ranks, device)
    else:
        ex.readmit([VICTIM])
    assert ex.alive() == list(range(num_ranks))
    x, idx = inputs_of(rank, num_ranks, device)
    for _ in range(3):
        assert torch.equal(sums_of(ex, x, idx), x * TOPK)
    torch.cuda.synchronize(device)
    ex.check()


# How many ranks, and of these in each domain.
WORLDS = [(3, 3), (4, 2), (3, 1)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_new_process_takes_the_place_of_a_lost_rank(ranks, world):
    num_ranks, per_domain = world
    ranks(killed_for_now, num_ranks, per_domain, dying=(VICTIM,))
    ranks(coming_back, num_ranks)


@pytest.mark.parametrize("is_replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_rest_goes_on_when_a_rank_is_killed(ranks, world, is_replayed):
    num_ranks, per_domain = world
    if is_replayed and per_domain < num_ranks:
        pytest.skip("calls between domains cannot be captured")
    ranks(lives_on, num_ranks, is_replayed, per_domain, dying=(VICTIM,))
