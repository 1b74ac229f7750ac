# SPDX-License-Identifier: Apache-2.0
"""Rows grouped by expert: forward and backward bit for bit against loops."""

import fused_cases as cases
import pytest
import torch

import oracle
import weft.fused_a2a as fa

TOPK, LOCAL = 3, 4
NEMO = ("num_permuted_tokens", "pad_multiple")
MEGATRON = (
    "num_blocks_permute",
    "num_blocks_unpermute",
    "fused",
    "num_permuted_tokens",
    "pad_multiple",
    "num_sms_preprocessing_api",
)


def row_probs_of(all_idx, all_probs, slots, rank):
    want = torch.zeros(slots.rows[rank])
    for idx, probs, slot in zip(all_idx, all_probs, slots.slots):
        for t, k in (slot >= 0).nonzero().tolist():
            if int(idx[t, k]) // LOCAL == rank:
                want[slot[t, k]] = probs[t, k]
    return want


def exact(rank, num_ranks, group, tokens, names, pad, budget, fused):
    cases.reset()
    num_experts = LOCAL * num_ranks
    x, idx, probs = cases.inputs(rank, tokens[rank % len(tokens)], TOPK, num_experts)
    idx = idx.masked_fill(idx < 0, num_experts).sort(1).values  # by expert, as the map has it
    idx = idx.masked_fill(idx == num_experts, -1)
    probs = torch.where(idx >= 0, probs + 0.1, 0.0)
    routing_map, dense = cases.to_dense(idx, probs, num_experts)
    x, dense = cases.leaves(x, dense)
    options = {"num_permuted_tokens": budget, "pad_multiple": pad or None, "fused": fused}
    rest = [options.get(name) for name in names]
    rows, row_probs, scales, counts, handle = fa.HybridEPDispatch.apply(
        x, routing_map, dense, group, LOCAL, 24, 24, *rest
    )
    all_x, all_idx = oracle.gather(group, x.detach()), oracle.gather(group, idx)
    all_probs = oracle.gather(group, probs)
    budgets = None if budget is None else [budget] * num_ranks
    slots = oracle.Slots(all_idx, num_experts, "expert_major", pad or 1, budgets=budgets)
    used = slots.rows[rank]
    if budget is not None:
        ends = [b + p for b, p in zip(slots.begin[rank], slots.padded[rank])]
        used = min(max(ends), budget)
        want_counts = [min(e, budget) - min(b, budget) for b, e in zip(slots.begin[rank], ends)]
        is_over = slots.required[rank] > budget
        assert handle[-1].dtype == torch.int32 and handle[-1].shape == (1,)
        assert bool(handle[-1]) or not is_over
        assert counts.tolist() == want_counts
        assert rows.shape[0] == budget
    else:
        assert counts.tolist() == slots.padded[rank] and counts.device.type == "cpu"
        assert handle[-1].tolist() == [0]
        assert rows.shape[0] == used
    assert counts.dtype == torch.int64 and scales is None
    want = oracle.dispatched(all_idx, slots, all_x, rank, num_experts)
    assert torch.equal(rows[:used], want[:used])
    assert row_probs.shape == rows.shape[:1] and row_probs.dtype == torch.float32
    want_probs = row_probs_of(all_idx, all_probs, slots, rank)
    assert torch.equal(row_probs[:used], want_probs[:used])
    assert rows.requires_grad and row_probs.requires_grad and not counts.requires_grad

    # Forward and backward of combine. What lies in padding and slack counts for nothing.
    gen = torch.Generator().manual_seed(50 + rank)
    out = torch.randn(rows.shape, generator=gen).to(rows.dtype).requires_grad_()
    tail = (counts.sum() if budget is None else budget, pad or None)
    tail += (fused,) if len(names) > 2 else ()
    back = fa.HybridEPCombine.apply(out, handle, *tail)
    all_out = oracle.gather(group, out.detach())
    assert torch.equal(back, oracle.combined(idx, slots.slots[rank], all_out, num_experts, x.dtype))
    grad_back = torch.randn(back.shape, generator=gen).to(back.dtype)
    back.backward(grad_back)
    all_grads = oracle.gather(group, grad_back)
    want = oracle.dispatched(all_idx, slots, all_grads, rank, num_experts)
    assert torch.equal(out.grad[:used], want[:used]) and out.grad.is_contiguous()

    # Backward of dispatch.
    grad_rows = torch.randn(rows.size(1), rows.size(0), generator=gen).to(rows.dtype).t()
    grad_probs = torch.randn(rows.size(0), 2, generator=gen)[:, 0]
    torch.autograd.backward([rows, row_probs], [grad_rows, grad_probs])
    all_grads = oracle.gather(group, grad_rows.contiguous())
    assert torch.equal(
        x.grad, oracle.combined(idx, slots.slots[rank], all_grads, num_experts, x.dtype)
    )
    all_grad_probs = oracle.gather(group, grad_probs)
    want = torch.zeros_like(dense)
    for t, k in (slots.slots[rank] >= 0).nonzero().tolist():
        expert = int(idx[t, k])
        want[t, expert] = all_grad_probs[expert // LOCAL][slots.slots[rank][t, k]]
    assert torch.equal(dense.grad, want)
    assert x.grad.is_contiguous() and dense.grad.is_contiguous()


@pytest.mark.parametrize("names", [(), NEMO, MEGATRON], ids=["short", "nemo", "megatron"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_is_exact(ranks, num_ranks, names):
    ranks(exact, num_ranks, (17, 0, 5, 8), names, 16 if names else 0, None, False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("budget", [16, 48, 128])
def test_budget(ranks, budget, fused):
    ranks(exact, 2, (17, 9), MEGATRON, 8, budget, fused)


def test_fused_is_equal(ranks):
    ranks(exact, 2, (6, 7), MEGATRON, 0, None, True)


def test_no_tokens_anywhere(ranks):
    ranks(exact, 2, (0,), NEMO, 8, None, False)


def lonely(rank, num_ranks, group):
    """All tokens go to rank 0."""
    cases.reset()
    num_tokens = 0 if rank == 1 else 5
    x = torch.ones(num_tokens, cases.HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    routing_map = torch.zeros(num_tokens, 2 * num_ranks, dtype=torch.bool)
    routing_map[:, 0] = True
    dense = (routing_map * 0.5).requires_grad_()
    rows, row_probs, _, counts, handle = fa.hybrid_ep_dispatch(x, routing_map, dense, group, 2)
    received = 5 * (num_ranks - 1) if rank == 0 else 0
    assert rows.shape == (received, cases.HIDDEN) and counts.tolist() == [received, 0]
    back = fa.hybrid_ep_combine((rows * row_probs.unsqueeze(1)).to(rows.dtype), handle)
    assert torch.equal(back, torch.full_like(x, 0.5))
    back.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))
    assert torch.equal(dense.grad, routing_map * float(cases.HIDDEN))


def test_ranks_without_rows_or_tokens(ranks):
    ranks(lonely, 3)


def first_call_uneven(rank, num_ranks, group):
    """The buffer is made from the first call's T, which is another on every rank."""
    fa.reset_hybrid_ep_buffer()
    tokens = 600 if rank == 0 else 1300
    x = torch.randn(tokens, 16).to(torch.bfloat16)
    chosen = torch.zeros(tokens, 2 * num_ranks, dtype=torch.bool)
    chosen[:, rank] = True
    rows, _, _, counts, handle = fa.hybrid_ep_dispatch(x, chosen, chosen.float(), group, 2)
    assert counts.tolist() == ([600, 1300] if rank == 0 else [0, 0])
    assert torch.equal(fa.hybrid_ep_combine(rows, handle), x)
    fa.reset_hybrid_ep_buffer()


def test_the_first_call_may_bring_another_t_on_every_rank(ranks):
    ranks(first_call_uneven, 2)


def without_probs(rank, num_ranks, group):
    """Rows alone, there and back, with gradients."""
    x = torch.randn(5 + rank, 16).to(torch.bfloat16).requires_grad_()
    chosen = torch.zeros(5 + rank, 2 * num_ranks, dtype=torch.bool)
    chosen[:, [0, 2]] = True
    rows, row_probs, _, counts, handle = fa.hybrid_ep_dispatch(x, chosen, None, group, 2)
    assert row_probs is None and counts.tolist() == [11, 0]
    out = fa.hybrid_ep_combine(rows, handle)
    assert torch.equal(out, 2 * x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_probabilities_may_be_missing(ranks):
    ranks(without_probs, 2)


def routed_by_indices(rank, num_ranks, group):
    """Indices in place of the map, as NeMo Automodel 0.7.0 gives them: the same in every way."""
    fa.reset_hybrid_ep_buffer()
    num_experts = 2 * num_ranks
    x, idx, probs = cases.inputs(rank, 9 + rank, 3, num_experts)
    routing_map, dense = cases.to_dense(idx, probs, num_experts)
    given = ((routing_map, {}), (None, {"topk_idx": idx, "num_experts": num_experts}))
    results = []
    for chosen, options in given:
        leaves = cases.leaves(x, dense)
        rows, row_probs, _, counts, handle = fa.hybrid_ep_dispatch(
            leaves[0], chosen, leaves[1], group, 2, fuse_permute=True, **options
        )
        out = fa.hybrid_ep_combine(rows * 2, handle, fuse_permute=True)
        torch.autograd.backward([out, row_probs], [out.detach(), row_probs.detach()])
        results.append([rows, row_probs, counts, out, leaves[0].grad, leaves[1].grad])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert results[0][0].size(0) == results[0][2].sum() > 0


def test_routing_by_indices(ranks):
    ranks(routed_by_indices, 2)
