# SPDX-License-Identifier: Apache-2.0
"""The functions of NCCL EP against loops over the tokens of all ranks."""

import fused_cases as cases
import pytest
import torch

import oracle
import weft
import weft.fused_a2a as fa

LOCAL, TOPK, HIDDEN = 3, 2, cases.HIDDEN


def wanted_rows(rank, all_idx, alignment):
    """(source, token, k) of each row of `rank`, None for padding; rows of each expert."""
    rows, counts = [], []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        block = [
            (source, token, k)
            for source, idx in enumerate(all_idx)
            for token, k in (idx == expert).nonzero().tolist()
        ]
        padded = -(-len(block) // max(alignment, 1)) * max(alignment, 1)
        rows += block + [None] * (padded - len(block))
        counts.append(padded)
    return rows, counts


def pair(group, x, idx, probs, capacity, alignment, on_rows, **memory):
    num_experts = LOCAL * group.size()
    sizes = (16, capacity, HIDDEN)
    fa.ensure_nccl_ep_bootstrapped(group, num_experts, *sizes, TOPK)
    buffer = fa.new_nccl_ep_buffer(TOPK, *sizes, LOCAL, alignment=alignment)
    rows, counts, row_probs = fa.nccl_ep_dispatch(buffer, x, idx, probs, **memory)
    out = fa.nccl_ep_combine(buffer, on_rows(rows, row_probs), num_local_tokens=x.size(0))
    return buffer, rows, counts, row_probs, out


def exact(rank, num_ranks, group, tokens, capacity, alignment, dtype):
    x, idx, probs = cases.inputs(rank, tokens[rank], TOPK, LOCAL * num_ranks, dtype)
    xs, ps = cases.leaves(x, probs)
    all_x, all_idx = oracle.gather(group, x), oracle.gather(group, idx)
    all_probs = oracle.gather(group, probs)
    memory = {}
    if capacity is not None:
        memory["recv_tokens"] = fa.alloc_ep_symm_buffer((capacity, HIDDEN), dtype, group)
        memory["recv_topk_weights"] = fa.alloc_ep_symm_buffer((capacity,), torch.float32, group)

    def experts(rows, row_probs):
        return rows * 2

    buffer, rows, counts, row_probs, out = pair(
        group, xs, idx, ps, capacity, alignment, experts, **memory
    )
    wanted, wanted_counts = wanted_rows(rank, all_idx, alignment)
    assert buffer.eager == (capacity is None)
    assert counts.dtype == torch.int64 and row_probs.shape == (rows.size(0),)
    assert buffer.total_recv_tokens.dtype == torch.int64
    assert buffer.total_recv_tokens.tolist() == [len(wanted)]
    kept = len(wanted) if capacity is None else min(capacity, len(wanted))
    assert rows.size(0) == (len(wanted) if capacity is None else capacity)
    assert counts is buffer.tokens_per_expert and int(counts.sum()) == kept
    if kept == len(wanted):
        assert counts.tolist() == wanted_counts
    for row, origin in enumerate(wanted[:kept]):
        if origin is None:
            assert not rows[row].any() and row_probs[row] == 0
            continue
        source, token, k = origin
        assert torch.equal(rows[row], all_x[source][token])
        assert row_probs[row] == all_probs[source][token, k]

    # What fits on its rank counts for a token.
    fits = torch.zeros(idx.shape, dtype=torch.bool)
    for other in range(num_ranks):
        theirs, _ = wanted_rows(other, all_idx, alignment)
        for origin in theirs[: len(theirs) if capacity is None else capacity]:
            if origin is not None and origin[0] == rank:
                fits[origin[1:]] = True
    num = fits.sum(1, keepdim=True)
    torch.testing.assert_close(out, (2 * num * x.float()).to(dtype))
    used = torch.arange(rows.size(0)) < kept
    (out.float().sum() + (row_probs * 3)[used].sum()).backward()
    torch.testing.assert_close(xs.grad.float(), (2 * num).expand(x.shape).float())
    torch.testing.assert_close(ps.grad, 3.0 * fits)
    return bool(kept < len(wanted))


@pytest.mark.parametrize("alignment", [0, 8])
@pytest.mark.parametrize("capacity", [None, 16, 200])
@pytest.mark.parametrize("tokens", [(12, 12), (13, 0), (0, 0)])
def test_rows_are_those_of_the_routing(ranks, tokens, capacity, alignment):
    over = ranks(exact, 2, tokens, capacity, alignment, torch.float32)
    assert any(over) or tokens != (12, 12) or capacity != 16
    assert capacity == 16 or not any(over)


def test_bfloat16(ranks):
    ranks(exact, 2, (9, 4), None, 0, torch.bfloat16)


def test_one_rank(ranks):
    ranks(exact, 1, (9,), 64, 4, torch.float32)


def larger_later(rank, num_ranks, group):
    """Without a capacity a rank may bring more tokens than it said; with one all ranks refuse."""
    x, idx, probs = cases.inputs(rank, (40, 3)[rank], TOPK, LOCAL * num_ranks, torch.float32)
    *_, out = pair(group, x, idx, probs, None, 0, lambda rows, _: rows)
    torch.testing.assert_close(out, x * (idx >= 0).sum(1, keepdim=True))
    with pytest.raises(weft.InvalidArgument, match=r"40 tokens \(max_tokens_per_rank = 16\)"):
        pair(group, x, idx, probs, 200, 0, lambda rows, _: rows)


def test_more_tokens_than_were_told(ranks):
    ranks(larger_later, 2)


def state(rank, num_ranks, group):
    fa.nccl_ep_finalize()
    assert not fa.is_nccl_ep_bootstrapped()
    with pytest.raises(RuntimeError, match="call ensure_nccl_ep_bootstrapped first"):
        fa.new_nccl_ep_buffer(2, 16, None, HIDDEN, LOCAL)
    with pytest.raises(ValueError, match="num_topk = 0"):
        fa.ensure_nccl_ep_bootstrapped(group, 6, 16, None, HIDDEN, 0)
    with pytest.raises(ValueError, match="zero_copy needs recv_capacity_per_rank"):
        fa.ensure_nccl_ep_bootstrapped(group, 6, 16, None, HIDDEN, 2, zero_copy=True)
    assert not fa.is_nccl_ep_bootstrapped()
    fa.ensure_nccl_ep_bootstrapped(group, 6, 16, 32, HIDDEN, 2, 0, True)
    first = fa._nccl_ep_ranks
    fa.ensure_nccl_ep_bootstrapped(group, 6, 16, 32, HIDDEN, 2)
    assert fa.is_nccl_ep_bootstrapped() and fa._nccl_ep_ranks is first
    for recipe in ("dispatch_fwd_quant_recipe", "combine_bwd_quant_recipe"):
        with pytest.raises(RuntimeError, match="give no recipe"):
            fa.new_nccl_ep_buffer(2, 16, None, HIDDEN, LOCAL, **{recipe: object()})
    for alignment in (-1, 3, 12):
        with pytest.raises(ValueError, match=f"alignment = {alignment}"):
            fa.new_nccl_ep_buffer(2, 16, None, HIDDEN, LOCAL, alignment)
    x, idx, probs = cases.inputs(rank, 4, TOPK, LOCAL * num_ranks, torch.float32)
    eager, fixed = (fa.new_nccl_ep_buffer(2, 16, c, HIDDEN, LOCAL) for c in (None, 32))
    memory = torch.empty(32, HIDDEN)
    with pytest.raises(ValueError, match="recv_tokens without recv_capacity_per_rank"):
        fa.nccl_ep_dispatch(eager, x, idx, probs, recv_tokens=memory)
    with pytest.raises(ValueError, match="recv_topk_weights does not have 32 rows"):
        fa.nccl_ep_dispatch(fixed, x, idx, probs, memory, torch.empty(31))
    rows, _, _ = fa.nccl_ep_dispatch(eager, x, idx, probs)
    out = fa.nccl_ep_combine(eager, rows)  # of max_tokens_per_rank rows
    assert out.shape == (16, HIDDEN) and not out[4:].any()
    torch.testing.assert_close(out[:4], x * (idx >= 0).sum(1, keepdim=True))
    fa.nccl_ep_finalize()
    fa.nccl_ep_finalize()
    assert not fa.is_nccl_ep_bootstrapped()


def test_life(ranks):
    ranks(state, 2)


def wrong_settings(rank, num_ranks, group, given, kind, reason):
    """The last rank sets up something wrong, at first and again when all have exchanged."""
    fa.nccl_ep_finalize()
    x, idx, probs = cases.inputs(rank, 4, TOPK, LOCAL * num_ranks, torch.float32)

    def layer(num_topk=TOPK, zero_copy=False, **more):
        sizes = (16, None, HIDDEN)
        fa.ensure_nccl_ep_bootstrapped(group, 6, *sizes, num_topk, 0, zero_copy)
        buffer = fa.new_nccl_ep_buffer(TOPK, *sizes, LOCAL, **more)
        rows, _, _ = fa.nccl_ep_dispatch(buffer, x, idx, probs)
        return fa.nccl_ep_combine(buffer, rows, num_local_tokens=4)

    is_wrong = rank == num_ranks - 1
    for _ in range(2):
        with pytest.raises(kind if is_wrong else weft.InvalidArgument, match=reason) as found:
            layer(**(given if is_wrong else {}))
        assert is_wrong or f"rank {num_ranks - 1} refused the call" in str(found.value)
        torch.testing.assert_close(layer(), x * (idx >= 0).sum(1, keepdim=True))
    fa.nccl_ep_finalize()


@pytest.mark.parametrize(
    ("given", "kind", "reason"),
    [
        ({"num_topk": 0}, ValueError, "num_topk = 0"),
        ({"num_topk": "two"}, TypeError, "'<' not supported"),
        ({"zero_copy": True}, ValueError, "zero_copy needs recv_capacity_per_rank"),
        ({"alignment": 3}, ValueError, "alignment = 3"),
        ({"alignment": "all"}, TypeError, "'<' not supported"),
        ({"dispatch_fwd_quant_recipe": "fp8"}, RuntimeError, "give no recipe"),
    ],
)
def test_all_ranks_hear_of_wrong_settings_of_one(ranks, given, kind, reason):
    ranks(wrong_settings, 2, given, kind, reason)
