# SPDX-License-Identifier: Apache-2.0
"""Calls by copy engines beside computation, of ranks that come to them at different times.

What rank r sends in a call is a number of its own, so that a wrong sum tells whose rows of which
call it has: expected is a * v + b * 8 v for a rows of rank 0 and b of rank 1, with v = 1 to 3.
"""

import pytest
import torch

import weft
from weft.overlap_settings import overlapped

TOKENS, HIDDEN, EXPERTS, TOPK = 8192, 2048, 128, 8
CALLS = 40


def calls(rank, num_ranks, group):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    exchange = weft.Exchange(
        group,
        hidden=HIDDEN,
        num_experts=EXPERTS,
        max_tokens=TOKENS,
        max_topk=TOPK,
        device=device,
        copy_engines=True,
    )
    generator = torch.Generator(device).manual_seed(rank)
    keys = torch.rand(TOKENS, EXPERTS, generator=generator, device=device)
    choices = keys.topk(TOPK).indices
    there = (choices >= EXPERTS // 2).sum(1, keepdim=True)  # rows of a token on rank 1
    factor = TOPK - there + 8 * there
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    comm, compute = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
    wrong = []
    plan = exchange.plan(choices)
    torch.cuda.synchronize()
    with overlapped():
        for i in range(CALLS):
            v = i % 3 + 1
            # Each rank is late in turn, by up to four products.
            for _ in range((i * 7 + rank * 3) % 5):
                _ = matrix @ matrix
            made = torch.full((plan.num_rows, HIDDEN), v * 8.0**rank, device=device)
            made = made.to(torch.bfloat16)
            comm.wait_stream(compute)
            with torch.cuda.stream(comm):
                made.record_stream(comm)
                x = torch.full((TOKENS, HIDDEN), float(v), device=device, dtype=torch.bfloat16)
                rows = exchange.dispatch(plan, x, copy_engines=True).rows
                out = exchange.combine(plan, made, copy_engines=True).x
                wrong.append(((rows != v).sum(), (out != factor * v).sum()))
    torch.cuda.synchronize()
    assert exchange.stats()["num_copied"] == 2 * CALLS
    found = [(i, int(rows), int(sums)) for i, (rows, sums) in enumerate(wrong)]
    assert [one for one in found if one[1:] != (0, 0)] == [], (
        "(call, dispatched, combined) elements"
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_beside_computation(ranks):
    ranks(calls, 2)
