# SPDX-License-Identifier: Apache-2.0
"""on_peer_loss="shrink" on GPUs: a rank is killed, the others hear of it and go on."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import weft

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


def lives_on(rank, num_ranks, group, is_replayed):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    told = []
    ex = weft.Exchange(
        group,
        hidden=HIDDEN,
        num_experts=PER_RANK * num_ranks,
        max_tokens=TOKENS,
        device=device,
        on_peer_loss="shrink",
        on_loss=told.append,
    )
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
        with pytest.raises(weft.Unsupported, match="of a Balance on GPUs"):
            weft.Balance(ex, replicas=1, shapes=[(4, 4)], on_peer_loss="shrink")
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


@pytest.mark.parametrize("is_replayed", [False, True], ids=["eager", "replayed"])
def test_the_rest_goes_on_when_a_rank_is_killed(ranks, is_replayed):
    ranks(lives_on, 3, is_replayed, dying=(VICTIM,))
