# SPDX-License-Identifier: Apache-2.0
"""One row per token and rank: forward and backward bit for bit against loops."""

import fused_cases as cases
import pytest
import torch

import oracle
import weft
import weft.fused_a2a as fa

TOPK = 3


def expected_slots(idx, local, rank):
    """Indices as `rank` sees them: local, or -1; and which of them are local."""
    mine = (idx >= rank * local) & (idx < (rank + 1) * local)
    return torch.where(mine, idx - rank * local, -1), mine


def exact(rank, num_ranks, group, family, tokens, flags):
    cases.reset()
    num_experts, local = 4 * num_ranks, 4
    x, idx, probs = cases.inputs(rank, tokens[rank % len(tokens)], TOPK, num_experts)
    x, probs = cases.leaves(x, probs)
    rows, row_idx, row_probs, counts, handle = cases.dispatch_rows(
        family, group, x, idx, probs, num_experts, **flags
    )
    all_x, all_idx = oracle.gather(group, x.detach()), oracle.gather(group, idx)
    all_probs = oracle.gather(group, probs.detach())
    slots = oracle.Slots(all_idx, num_experts, "rank_major")

    # Forward of dispatch.
    assert torch.equal(rows, oracle.dispatched(all_idx, slots, all_x, rank, num_experts))
    want_idx = torch.full((slots.rows[rank], TOPK), -1)
    want_probs = torch.zeros(slots.rows[rank], TOPK)
    for theirs, their_probs, slot in zip(all_idx, all_probs, slots.slots):
        local_idx, mine = expected_slots(theirs, local, rank)
        want_idx[slot[mine], mine.nonzero()[:, 1]] = local_idx[mine]
        want_probs[slot[mine], mine.nonzero()[:, 1]] = their_probs[mine]
    assert row_idx.dtype == torch.int64 and torch.equal(row_idx, want_idx)
    known = torch.where(row_idx >= 0, row_probs, 0.0) if family == "deepepv2" else row_probs
    assert row_probs.dtype == torch.float32 and torch.equal(known, want_probs)
    assert counts.dtype == torch.int64 and counts.device.type == "cpu"
    assert counts.tolist() == slots.counts[rank]
    assert rows.requires_grad and row_probs.requires_grad
    assert not row_idx.requires_grad and not counts.requires_grad

    # Forward of combine.
    gen = torch.Generator().manual_seed(50 + rank)
    out = torch.randn(rows.shape, generator=gen).to(rows.dtype).requires_grad_()
    back, second = cases.combine_rows(family, group, out, handle, **flags)
    assert second is None
    all_out = oracle.gather(group, out.detach())
    assert torch.equal(back, oracle.combined(idx, slots.slots[rank], all_out, num_experts, x.dtype))

    # Backward of combine: a dispatch.
    grad_back = torch.randn(back.shape, generator=gen).to(back.dtype)
    back.backward(grad_back)
    all_grads = oracle.gather(group, grad_back)
    assert torch.equal(out.grad, oracle.dispatched(all_idx, slots, all_grads, rank, num_experts))

    # Backward of dispatch: a combine. Not contiguous, and not zero where there is no expert.
    grad_rows = torch.randn(rows.size(1), rows.size(0), generator=gen).to(rows.dtype).t()
    grad_probs = torch.randn(TOPK, rows.size(0), generator=gen).t()
    torch.autograd.backward([rows, row_probs], [grad_rows, grad_probs])
    all_grads = oracle.gather(group, grad_rows.contiguous())
    assert torch.equal(
        x.grad, oracle.combined(idx, slots.slots[rank], all_grads, num_experts, x.dtype)
    )
    all_grad_probs = oracle.gather(group, grad_probs.contiguous())
    want = torch.zeros_like(probs)
    for t, k in (idx >= 0).nonzero().tolist():
        want[t, k] = all_grad_probs[int(idx[t, k]) // local][slots.slots[rank][t, k], k]
    assert torch.equal(probs.grad, want)
    assert x.grad.is_contiguous() and probs.grad.is_contiguous() and out.grad.is_contiguous()


@pytest.mark.parametrize("family", cases.ROW_FAMILIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_is_exact(ranks, family, num_ranks):
    ranks(exact, num_ranks, family, (17, 0, 5, 8), {})


@pytest.mark.parametrize("family", cases.ROW_FAMILIES)
@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_is_exact_with_streams_of_its_own(ranks, family, on_comm_stream):
    flags = {"async_finish": True, "allocate_on_comm_stream": on_comm_stream}
    ranks(exact, 2, family, (6, 9), flags)


@pytest.mark.parametrize("family", cases.ROW_FAMILIES)
def test_no_tokens_anywhere(ranks, family):
    ranks(exact, 2, family, (0,), {})


def handles(rank, num_ranks, group):
    """A fused dispatch makes no layout; the items of its handle are those of one with a layout."""
    cases.reset()
    for tokens in ((17, 0, 5), (0,)):
        num_tokens = tokens[rank % len(tokens)]
        x, idx, probs = cases.inputs(rank, num_tokens, TOPK, 4 * num_ranks)
        before = weft.stats()["calls"].get("get_dispatch_layout", 0)
        *_, handle = fa.fused_dispatch(x, idx, probs, 4 * num_ranks, group)
        assert weft.stats()["calls"].get("get_dispatch_layout", 0) == before
        buffer = fa.get_buffer(group, fa.get_hidden_bytes(x))
        per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4 * num_ranks)
        layout = (per_rank, per_host, in_rank, per_expert)
        *_, wanted, _ = buffer.dispatch(x, None, *layout, idx, probs)
        for got, want in zip(handle, wanted, strict=True):
            assert got.dtype == want.dtype and got.is_contiguous() == want.is_contiguous()
            assert torch.equal(got, want)
        assert torch.equal(handle.is_token_in_rank, in_rank)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_handle_without_a_layout(ranks, num_ranks):
    ranks(handles, num_ranks)


def lonely(rank, num_ranks, group, family):
    """All tokens go to rank 0: the others receive no row, and one of them has no token."""
    cases.reset()
    num_experts = 2 * num_ranks
    num_tokens = 0 if rank == 1 else 5
    x = torch.ones(num_tokens, cases.HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    idx = torch.zeros(num_tokens, 2, dtype=torch.int64)
    idx[:, 1] = -1
    probs = torch.full((num_tokens, 2), 0.5, requires_grad=True)
    rows, row_idx, row_probs, counts, handle = cases.dispatch_rows(
        family, group, x, idx, probs, num_experts
    )
    received = 5 * (num_ranks - 1) if rank == 0 else 0
    assert rows.shape == (received, cases.HIDDEN) and row_idx.shape == row_probs.shape
    assert counts.tolist() == [received, 0]
    used = torch.where(row_idx >= 0, row_probs, 0.0).sum(1, keepdim=True)
    back, _ = cases.combine_rows(family, group, rows * used.to(rows.dtype), handle)
    assert torch.equal(back, torch.full_like(x, 0.5))
    back.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))
    want = torch.tensor([float(cases.HIDDEN), 0.0]).expand_as(probs)
    assert torch.equal(probs.grad, want)


@pytest.mark.parametrize("family", cases.ROW_FAMILIES)
def test_ranks_without_rows_or_tokens(ranks, family):
    ranks(lonely, 3, family)


def without_probs_grad(rank, num_ranks, group, family):
    """Probabilities that one rank alone uses, and indices that are strided."""
    cases.reset()
    x, idx, probs = cases.inputs(rank, 6, 2, 4 * num_ranks)
    x, probs = cases.leaves(x, probs)
    strided = torch.stack([idx, idx], 2)[:, :, 0]
    rows, _, row_probs, _, _ = cases.dispatch_rows(family, group, x, strided, probs, 4 * num_ranks)
    loss = rows.float().sum()
    if rank == 0:
        loss = loss + (row_probs * 0.0).sum()
    loss.backward()
    assert torch.equal(probs.grad, torch.zeros_like(probs))
    copies = torch.stack([(idx // 4 == r).any(1) for r in range(num_ranks)]).sum(0)
    assert torch.equal(x.grad, copies.to(x.dtype).unsqueeze(1).expand_as(x))


@pytest.mark.parametrize("family", cases.ROW_FAMILIES)
def test_probabilities_used_by_one_rank_alone(ranks, family):
    ranks(without_probs_grad, 2, family)


def gaps(rank, num_ranks, group, family):
    cases.reset()
    num_experts = 4 * num_ranks
    given = cases.inputs(rank, 5, TOPK, num_experts)
    want = cases.dispatch_rows(family, group, *given, num_experts)[:4]
    x, idx, probs = (torch.stack((each, each), dim=2)[..., 0] for each in given)
    x.requires_grad_()
    assert not any(each.is_contiguous() for each in (x, idx, probs))
    for async_finish in (False, True):
        found = cases.dispatch_rows(
            family, group, x, idx, probs, num_experts, async_finish=async_finish
        )[:4]
        assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("family", cases.ROW_FAMILIES)
def test_tensors_may_have_gaps(ranks, family):
    ranks(gaps, 2, family)
