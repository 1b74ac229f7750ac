# SPDX-License-Identifier: Apache-2.0
"""Rows that dispatch makes FP8 of, against torch's own conversion."""

import pytest
import torch

import weft
from oracle import inputs
from weft import fp8
from weft.outputs import Beside

HIDDEN = 384
KINDS = {"e4m3": (torch.float8_e4m3fn, 448), "e5m2": (torch.float8_e5m2, 57344)}


def as_fp8(x, kind):
    """Stored form of bf16 rows [T, H]: FP8 [T, H], float32 [T, H / 128]."""
    dtype, largest = KINDS[kind]
    groups = x.float().unflatten(1, (-1, 128))
    amax, largest = groups.abs().amax(2), torch.tensor(largest, dtype=torch.float32)
    scales = torch.where(amax == 0, 1, amax * (torch.tensor(1.0) / largest))
    factors = torch.where(amax == 0, 1, largest / amax)
    return (groups * factors.unsqueeze(2)).flatten(1).to(dtype), scales


def quantised(rank, num_ranks, group, kind, layout):
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_tokens=32)
    _, idx, weights = inputs(rank, (17, 0, 5)[rank % 3], 3, num_experts)
    x = (
        torch.randn(len(idx), HIDDEN)
        * 2.0 ** torch.randint(-20, 20, (len(idx), 3)).repeat_interleave(128, 1)
    ).bfloat16()
    x[:1, :128] = 0
    plan = ex.plan(idx, layout=layout)
    made = ex.dispatch(plan, x, weights, quantise=kind)
    rows, scales = as_fp8(x, kind)
    expected = ex.dispatch(plan, rows, weights, scales)
    assert made.rows.dtype == KINDS[kind][0]
    is_row = torch.ones(plan.num_rows, dtype=torch.bool)
    if layout == "expert_strided":
        stride = plan.num_rows // len(plan.rows_per_expert)
        is_row = (torch.arange(stride) < plan.rows_per_expert.unsqueeze(1)).flatten()
    for got, want in zip(made, expected):
        assert torch.equal(got[is_row].view(torch.uint8), want[is_row].view(torch.uint8))
    again, _ = ex.plan_and_dispatch(idx, x, weights, layout=layout, quantise=kind)
    assert again.num_rows == plan.num_rows


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_fp8_with_a_scale_for_128_elements(ranks, kind, layout):
    ranks(quantised, 2, kind, layout)


def refused(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 8, 2, 4, torch.bfloat16)
    x = x.repeat(1, -(-HIDDEN // x.size(1)))[:, :HIDDEN].contiguous()
    plan = ex.plan(idx)
    with pytest.raises(weft.InvalidArgument, match="quantise") as caught:
        ex.dispatch(plan, x, quantise="e4m3" if rank == 1 else "none")
    assert "e4m3" in str(caught.value) and "none" in str(caught.value)
    with pytest.raises(weft.InvalidArgument, match="quantise of float32 rows"):
        ex.dispatch(plan, x.float(), quantise="e4m3")
    with pytest.raises(weft.InvalidArgument, match="scales are given beside quantise"):
        ex.dispatch(plan, x, None, x[:, :4].contiguous(), quantise="e4m3")
    ex.dispatch(plan, x, quantise="e5m2")


def test_ranks_that_differ_and_rows_that_cannot_be_made_are_refused(ranks):
    ranks(refused, 2)


def by_rule(rank, num_ranks, group, rule, has_stride):
    """Rows and scales follow the rule, whether the number of rows is given or told by the plan."""
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_tokens=32)
    num_tokens = (17, 5)[rank]
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    x[:1] = 0
    idx = torch.randint(num_experts, (num_tokens, 3))
    unknown = idx.clone()
    unknown[:, 2] = torch.tensor([-7, num_experts, 2**40])[torch.arange(num_tokens) % 3]
    idx[:, 2] = -1
    options = {"layout": "expert_strided", "expert_stride": 40 if has_stride else 0}
    sums = torch.full((4,), 5, dtype=torch.int32)
    beside = Beside(counts=torch.empty(4, dtype=torch.int32), count_sums=sums)
    options |= {"ignores_unknown": True, "quantise": "e4m3", "scale_rule": rule}
    plan, made = ex.plan_and_dispatch(unknown, x, beside=beside, **options)
    want_rows, want_scales = fp8.to_fp8(x, round_scale=rule != "clamped")
    if rule == "ue8m0":
        want_scales = (want_scales.view(torch.int32) >> 23).to(torch.uint8)
    _, expected = ex.plan_and_dispatch(
        idx, want_rows, None, want_scales, layout=options["layout"], expert_stride=40 * has_stride
    )
    stride = plan.num_rows // 4
    is_row = (torch.arange(stride) < plan.rows_per_expert.unsqueeze(1)).flatten()
    for got, want in ((made.rows, expected.rows), (made.scales, expected.scales)):
        assert torch.equal(got[is_row].view(torch.uint8), want[is_row].view(torch.uint8))
    assert torch.equal(beside.counts, plan.rows_per_expert.int())
    assert torch.equal(sums, beside.counts + 5)


@pytest.mark.parametrize("has_stride", [False, True])
@pytest.mark.parametrize("rule", ["clamped", "power_of_two", "ue8m0"])
def test_rules_hold_with_any_number_of_rows(ranks, rule, has_stride):
    ranks(by_rule, 2, rule, has_stride)
