# SPDX-License-Identifier: Apache-2.0
"""weft.Exchange against loops over everybody's inputs, bit for bit."""

import pytest
import torch

import oracle
import weft
from oracle import HIDDEN, inputs
from weft.compat.deep_ep import Buffer
from weft.outputs import Beside


def exact(rank, num_ranks, group, layout, dtype, tokens):
    num_experts, topk = 4 * num_ranks, 3
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    x, idx, weights = inputs(rank, tokens[rank % len(tokens)], topk, num_experts, dtype)
    pad = 1 if layout == "rank_major" else 4
    stride = 64 if layout == "expert_strided" else 0
    plan = ex.plan(idx, layout=layout, pad_multiple=pad, expert_stride=stride)
    all_idx, all_x = oracle.gather(group, idx), oracle.gather(group, x)
    slots = oracle.Slots(all_idx, num_experts, layout, pad, stride)
    assert plan.num_rows == slots.rows[rank]
    assert plan.rows_per_expert.tolist() == slots.counts[rank]
    assert plan.expert_begin.tolist() == slots.begin[rank]
    assert plan.overflow.tolist() == [0]
    rows, row_weights, scales = weft.dispatch(plan, x, weights, x[:, :5].contiguous())
    used = torch.ones(plan.num_rows, dtype=torch.bool)
    if layout == "expert_strided":  # the rest of a block is left as it was
        used = torch.arange(stride).repeat(4) < plan.padded_rows_per_expert.repeat_interleave(
            stride
        )
    want = oracle.dispatched(all_idx, slots, all_x, rank, num_experts)
    assert torch.equal(rows[used], want[used])
    want = oracle.dispatched(all_idx, slots, [a[:, :5] for a in all_x], rank, num_experts)
    assert torch.equal(scales[used], want[used])
    out, back = weft.combine(plan, rows, row_weights)
    all_rows = oracle.gather(group, rows)
    want = oracle.combined(idx, slots.slots[rank], all_rows, num_experts, dtype)
    assert torch.equal(out, want)
    assert torch.equal(back, torch.where(idx >= 0, weights, torch.zeros(())))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_strided"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_is_exact(ranks, layout, num_ranks):
    ranks(exact, num_ranks, layout, torch.float32, (17, 0, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_exact_in_half_precision(ranks, dtype):
    ranks(exact, 2, "expert_major", dtype, (20, 7))


def transport(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=8, num_experts=num_ranks)
    exchange.plan(torch.zeros(1, 1).long())
    assert exchange.transport == "shm"


def test_tells_its_transport(ranks):
    ranks(transport, 2)


def nobody(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    plan = ex.plan(torch.empty(0, 2, dtype=torch.int64))
    rows, weights, _ = weft.dispatch(plan, torch.empty(0, HIDDEN), torch.empty(0, 2))
    assert rows.shape == (0, HIDDEN) and weights.shape == (0, 1)
    out, _ = weft.combine(plan, rows)
    assert out.shape == (0, HIDDEN)


def test_without_any_token(ranks):
    ranks(nobody, 2)


def growth(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4, max_tokens=8, max_topk=1)
    old_x, old_idx, _ = inputs(rank, 4, 1, 4)
    old = ex.plan(old_idx)
    before, _, _ = weft.dispatch(old, old_x)
    tokens = 100 if rank == 1 else 3
    x, idx, _ = inputs(rank, tokens, 1, 4, seed=1)
    plan = ex.plan(idx)
    assert ex.max_tokens == 128
    rows, _, _ = weft.dispatch(plan, x)
    out, _ = weft.combine(plan, rows)
    assert torch.equal(out, torch.where(idx >= 0, x, torch.zeros(())))
    again, _, _ = weft.dispatch(old, old_x)  # a plan of before is as good as it was
    assert torch.equal(again, before)
    wide = torch.zeros(tokens, 5, dtype=torch.int64)
    assert ex.plan(wide).topk == 5
    assert ex.plan(routing_map=torch.ones(tokens, 4, dtype=torch.bool)).num_rows == 206


def test_grows_when_one_rank_has_more_tokens(ranks):
    ranks(growth, 2)


def refusals(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 6, 2, 4)
    bad = idx.clone()
    if rank == 0:
        bad[3, 1] = 4
    texts = []
    for call in (
        lambda: ex.plan(bad),
        lambda: ex.plan(idx.float() if rank == 0 else idx),
        lambda: ex.plan(idx.double() if rank == 0 else idx),
        lambda: ex.plan(idx, layout="sideways" if rank == 0 else "rank_major"),
        lambda: ex.plan(torch.zeros(2, 33, dtype=torch.int64)),
    ):
        with pytest.raises(weft.InvalidArgument) as refused:
            call()
        texts.append(str(refused.value))
        assert refused.value.code and isinstance(refused.value, ValueError)
    plan = ex.plan(idx)
    for call in (
        lambda: weft.dispatch(plan, x[:5] if rank == 0 else x),
        lambda: weft.dispatch(plan, x.double() if rank == 0 else x),
        lambda: weft.combine(plan, torch.zeros(plan.num_rows + (rank == 0), HIDDEN)),
    ):
        with pytest.raises(weft.InvalidArgument) as refused:
            call()
        texts.append(str(refused.value))
    rows, _, _ = weft.dispatch(plan, x)  # still usable
    return texts


def test_every_rank_raises_and_the_exchange_stays_usable(ranks):
    first, second = ranks(refusals, 2)
    assert "topk_idx[3, 1] = 4" in first[0] and "4" in second[0]
    assert "rank 0 refused the call" in second[0]
    assert "'sideways' is unknown" in first[3]


def refused_beforehand(rank, num_ranks, group):
    """Rank 0 cannot make the calls that the others make; the first needs a larger exchange."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4, max_tokens=2)
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    larger = torch.cat([idx] * 4)
    texts = []
    for verb, call in (
        ("plan", lambda: ex.plan(larger)),
        ("plan_and_dispatch", lambda: ex.plan_and_dispatch(larger, torch.cat([x] * 4))),
        ("plan_and_dispatch", lambda: ex.plan_and_dispatch(idx, x)),
        ("dispatch", lambda: ex.dispatch(plan, x)),
        ("combine", lambda: ex.combine(plan, torch.zeros(plan.num_rows, HIDDEN))),
    ):
        if rank == 0:
            ex.refuse(verb, "not today", *((plan,) if verb in ("dispatch", "combine") else ()))
            continue
        with pytest.raises(weft.InvalidArgument) as refused:
            call()
        texts.append(str(refused.value).split(" [")[0])
    rows, _, _ = weft.dispatch(ex.plan(idx), x)  # still usable
    return texts


def test_a_rank_refuses_without_a_call(ranks):
    _, texts = ranks(refused_beforehand, 2)
    assert texts == [
        f"{op}: rank 0 refused the call: not today"
        for op in ("plan", "plan", "plan", "dispatch", "combine")
    ]


def budget(rank, num_ranks, group):
    num_experts, rows_given = 4, 12
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts)
    x, idx, _ = inputs(rank, 20, 2, num_experts)
    plan = ex.plan(idx, pad_multiple=4, row_budget=rows_given)
    all_idx, all_x = oracle.gather(group, idx), oracle.gather(group, x)
    slots = oracle.Slots(all_idx, num_experts, "expert_major", 4, 0, [rows_given] * num_ranks)
    assert plan.num_rows == rows_given and plan.overflow.tolist() == [1]
    assert plan.required_rows == slots.required[rank]
    assert plan.num_rows_used.tolist() == [rows_given]
    assert plan.rows_per_expert.tolist() == slots.counts[rank]
    rows, _, _ = weft.dispatch(plan, x)
    assert torch.equal(rows, oracle.dispatched(all_idx, slots, all_x, rank, num_experts))
    out, _ = weft.combine(plan, rows)
    kept = (slots.slots[rank] >= 0).sum(1, keepdim=True)
    assert torch.allclose(out, x * kept)
    roomy = ex.plan(idx, pad_multiple=4, row_budget=400)
    assert roomy.overflow.tolist() == [0]
    assert roomy.num_rows_used.tolist() == [roomy.required_rows]


def test_budget_drops_the_last_slots(ranks):
    ranks(budget, 2)


def plans_out_of_order(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    made = []
    for seed in range(5):
        x, idx, _ = inputs(rank, 3 + 4 * seed, 2, 4, seed=seed)
        plan = ex.plan(idx, layout="rank_major" if seed % 2 else "expert_major")
        made.append((x, idx, plan, weft.dispatch(plan, x).rows))
    for x, idx, plan, rows in reversed(made):
        out, _ = weft.combine(plan, rows)
        local = 4 // num_ranks
        if plan.layout == "rank_major":
            hit = [(idx // local == r).logical_and(idx >= 0).any(1) for r in range(num_ranks)]
            count = torch.stack(hit).sum(0)
        else:
            count = (idx >= 0).sum(1)
        assert torch.allclose(out, x * count[:, None])


def test_many_plans_alive(ranks):
    ranks(plans_out_of_order, 2)


def bytes_of_any_kind(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 9, 2, 4)
    plan = ex.plan(idx, layout="rank_major")
    rows = weft.dispatch(plan, x).rows
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8):
        got = weft.dispatch(plan, x.to(dtype)).rows
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), rows.to(dtype).view(torch.uint8))


def one_column(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, weights = inputs(rank, 9, 2, 4)
    plan = ex.plan(idx, layout="rank_major")
    whole = weft.dispatch(plan, x, scales=weights).scales
    assert torch.equal(weft.dispatch(plan, x, scales=weights[:, 1:]).scales, whole[:, 1:])
    assert torch.equal(
        weft.dispatch(plan, x.repeat(1, 2)[:, :HIDDEN]).rows, weft.dispatch(plan, x).rows
    )


def test_strided_inputs(ranks):
    ranks(one_column, 2)


def test_opaque_bytes(ranks):
    ranks(bytes_of_any_kind, 2)


def closed(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    _, idx, _ = inputs(rank, 9, 2, 4)
    ex.plan(idx)
    assert ex.stats()["num_plans"] == 1 and ex.footprint()["control_bytes"] > 0
    ex.close()
    with pytest.raises(weft.InvalidArgument, match="was closed"):
        ex.plan(idx)
    assert weft.Group.of(group) is ex.group


def test_use_after_close(ranks):
    ranks(closed, 2)


def subgroups(rank, num_ranks, group):
    import torch.distributed as dist

    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    ex = weft.Exchange(mine, hidden=HIDDEN, num_experts=4)
    assert (ex.rank, ex.num_ranks) == (rank // 2, 2)
    exact_in = inputs(rank, 8, 2, 4)
    plan = ex.plan(exact_in[1])
    out, _ = weft.combine(plan, weft.dispatch(plan, exact_in[0]).rows)
    assert torch.allclose(out, exact_in[0] * (exact_in[1] >= 0).sum(1, keepdim=True))


def test_group_rank_decides_not_world_rank(ranks):
    ranks(subgroups, 4)


def with_gaps(rank, num_ranks, group):
    """Memory for results of which only a copy could be written is refused, on all ranks."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    rows, _, _ = weft.dispatch(plan, x)
    want = weft.combine(plan, rows).x
    columns, every_other = torch.zeros(6, 2 * HIDDEN)[:, :HIDDEN], torch.zeros(12, HIDDEN)[::2]
    counts = torch.zeros(4, dtype=torch.int32)
    strided = {"layout": "expert_strided", "expert_stride": 24, "blocks": True}
    found = []
    for call, whole, gaps in (
        (lambda m: ex.combine(plan, rows, out=m), torch.zeros(6, HIDDEN), columns),
        (lambda m: ex.combine(plan, rows, out=m), torch.zeros(6, HIDDEN), every_other),
        (
            lambda m: ex.plan_and_dispatch(idx, x, beside=Beside(count_sums=m), **strided),
            counts[:2],
            counts[::2],
        ),
    ):
        with pytest.raises(weft.InvalidArgument) as refused:
            call(gaps if rank == 1 else whole)
        found.append(str(refused.value))
        assert not gaps.any()
    memory = torch.zeros(6, HIDDEN)
    assert torch.equal(ex.combine(plan, rows, out=memory).x, want)
    assert torch.equal(memory, want)
    return found


def test_memory_with_gaps_is_refused(ranks):
    for texts in ranks(with_gaps, 2):
        assert all("has gaps (contiguous memory is expected)" in text for text in texts)


def other_defaults(rank, num_ranks, group, dtype, device):
    """A program's default dtype and device change nothing."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, weights = inputs(rank, 6, 2, 4)
    blocks = torch.zeros(48, HIDDEN)

    def calls():
        leaf = x.clone().requires_grad_()
        plan, (rows, row_weights, _) = weft.plan_and_dispatch(ex, idx, leaf, weights, balance=1)
        out = weft.combine(plan, rows, row_weights)
        out.x.sum().backward()
        made = (plan.placement, plan.routes_per_expert, plan.rows_per_expert, plan.num_rows_used)
        strided = ex.plan(idx, layout="expert_strided", expert_stride=24)
        weft.combine(strided, blocks.clone().requires_grad_()).x.sum().backward()
        return (*out, leaf.grad, *made, ex.renormalisation(idx, weights, plan))

    def everything():
        low = Buffer(group, low_latency_mode=True)
        rows, counts, handle, *_ = low.low_latency_dispatch(x.bfloat16(), idx, 8, 4, use_fp8=False)
        sums, *_ = low.low_latency_combine(rows, idx, weights, handle)
        return (*calls(), counts, sums)

    want = everything()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        found = everything()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(usual)
    for one, other in zip(found, want, strict=True):
        assert one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, None), (torch.float16, "meta")])
def test_defaults_of_a_program_change_nothing(ranks, dtype, device):
    ranks(other_defaults, 2, dtype, device)
