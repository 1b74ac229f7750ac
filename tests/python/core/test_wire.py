# SPDX-License-Identifier: Apache-2.0
"""combine(wire=...): what travels is as docs/wire.md says, in fewer bytes; gradients stay exact."""

import pytest
import torch

import weft
from domain_cases import NUM_RANKS, two_domains
from oracle import inputs
from weft import _core

HIDDEN, EXPERTS, TOKENS = 384, 8, 33
WIRES = ["fp8", "logfmt10"]


def fp8(groups):
    """Values that are read of float32 [..., 128] sent as FP8."""
    amax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1, amax / torch.tensor(448.0)).clamp(min=2.0**-126)
    return (groups / scale).to(torch.float8_e4m3fn).float() * scale


def logfmt10(groups):
    """Values that are read of float32 [..., 128] sent as logfmt10, computed in integers."""
    bits = groups.abs().view(torch.int32).long()
    largest = bits.amax(-1, keepdim=True)
    least = torch.where(bits == 0, 1 << 40, bits).amin(-1, keepdim=True)
    least = least.maximum((largest - (32 << 23)).clamp(min=0)) >> 16 << 16
    unit = 16 * 510
    step = (((largest - least).clamp(min=0) + unit - 1) // unit).clamp(min=1) * 16
    code = (bits - least + step // 2) // step
    read = torch.where((bits == 0) | (bits < least), 0, least + code * step)
    return read.int().view(torch.float32).copysign(groups)


def coded(wire, rows):
    groups = rows.float().unflatten(-1, (-1, 128))
    return {"fp8": fp8, "logfmt10": logfmt10}[wire](groups).flatten(-2)


def wide_rows(num_rows, seed):
    gen = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-25, 25, (num_rows, HIDDEN), generator=gen)
    sizes[: num_rows // 2] = 1
    rows = (torch.randn(num_rows, HIDDEN, generator=gen) * sizes).bfloat16()
    rows[:2, :128] = 0
    return rows


def one_row_each(rank, num_ranks, group, wire):
    """With one expert a token, what comes back is its row, coded."""
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    _, idx, _ = inputs(rank, TOKENS, 1, EXPERTS)
    x = wide_rows(TOKENS, rank)
    plan = weft.plan(exchange, idx)
    rows = weft.dispatch(plan, x).rows
    out = weft.combine(plan, rows, wire=wire).x
    want = torch.where(idx >= 0, coded(wire, x), 0).bfloat16()
    assert torch.equal(out, want)
    assert not torch.equal(out, weft.combine(plan, rows).x)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_rows_arrive_as_their_codes(ranks, wire, num_ranks):
    ranks(one_row_each, num_ranks, wire)


def gradients(rank, num_ranks, group, wire):
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    x, idx, weights = inputs(rank, TOKENS, 3, EXPERTS, torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    plan = weft.plan(exchange, idx)
    rows, row_weights, _ = weft.dispatch(plan, x, weights)
    found = []
    for how in ({}, {"wire": wire}):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (rows, row_weights)]
        out = weft.combine(plan, *leaves, **how)
        (out.x.float() @ x[0].float() + out.weights.sum(1)).sum().backward()
        found.append((out.x.detach(), [leaf.grad for leaf in leaves]))
    (plain, exact), (coded_sums, ours) = found
    for one, other in zip(exact, ours):
        assert torch.equal(one, other)
    assert not torch.equal(plain, coded_sums)
    torch.testing.assert_close(coded_sums.float(), plain.float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("wire", WIRES)
def test_the_backward_is_exact(ranks, wire):
    ranks(gradients, 2, wire)


def counted(rank, num_ranks, group):
    with two_domains() as domains:
        exchange = weft.Exchange(domains, hidden=HIDDEN, num_experts=EXPERTS)
        _, idx, _ = inputs(rank, TOKENS, 3, EXPERTS)
        plan = weft.plan(exchange, idx)
        rows = weft.dispatch(plan, wide_rows(TOKENS, rank)).rows
        found = {}
        for wire in ("none", *WIRES):
            before = exchange.stats()["crossing_bytes"]
            weft.combine(plan, rows, wire=wire)
            found[wire] = exchange.stats()["crossing_bytes"] - before
        row_bytes = {wire: _core.wire_row_bytes(wire, HIDDEN) for wire in found}
        assert row_bytes == {"none": 768, "fp8": 400, "logfmt10": 496}
        for wire in WIRES:
            assert 0 < found[wire] * row_bytes["none"] == found["none"] * row_bytes[wire]


def test_fewer_bytes_cross(ranks):
    ranks(counted, NUM_RANKS)


def refusals(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS)
    _, idx, _ = inputs(rank, TOKENS, 2, EXPERTS)
    plan = weft.plan(exchange, idx)
    rows = weft.dispatch(plan, wide_rows(TOKENS, rank)).rows

    def refused(match, plan=plan, rows=rows, wire="fp8"):
        with pytest.raises(weft.InvalidArgument, match=match):
            weft.combine(plan, rows, wire=wire)

    refused("wire = 'fp4' is unknown .one of: none, fp8, logfmt10", wire="fp4")
    refused("wire of float32 rows of 384 elements .bfloat16 and", rows=rows.float())
    refused("wire with a plan of order topk", plan=weft.plan(exchange, idx, order="topk"))
    refused("wire = .* here and .* on rank", wire=WIRES[rank % 2])
    refused("wire = 'x' is unknown" if rank == 0 else "rank 0", wire="x" if rank == 0 else "fp8")


def test_what_does_not_fit_is_refused_on_all_ranks(ranks):
    ranks(refusals, 2)
