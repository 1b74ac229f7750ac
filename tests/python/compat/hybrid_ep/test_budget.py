# SPDX-License-Identifier: Apache-2.0
"""A fixed number of rows: what is dropped, the overflow flag, and what comes back."""

import pytest
import torch
from hybrid_ep_oracle import Case, gather, same_bits

import weft
from weft.compat.deep_ep.hybrid_ep import HybridEPBuffer

PAD = 4


def buffer_of(group, case):
    return HybridEPBuffer(group, case.hidden.size(1), 64, case.local)


def dispatch(buffer, case, budget, **more):
    return buffer.dispatch_with_permute(
        hidden=case.hidden,
        routing_map=case.map,
        probs=case.probs,
        pad_multiple=PAD,
        num_permuted_tokens=budget,
        non_blocking=True,
        **more,
    )


def budgets_of(case, change):
    """Rows that rank 0 lacks (change < 0) or has to spare; the other ranks have 8 to spare."""
    needs = [case.slots(rank, PAD)[2] for rank in range(case.num_ranks)]
    return [max(0, need + (change if rank == 0 else 8)) for rank, need in enumerate(needs)]


def fixed(rank, num_ranks, group, change):
    case = Case(rank, num_ranks, group, (12, 7, 0), density=0.4).gather()
    buffer = buffer_of(group, case)
    budgets = budgets_of(case, change)
    budget = budgets[rank]
    for fused in (False, True):
        rows, probs, _, counts, handle = dispatch(buffer, case, budget, fuse_permute_dispatch=fused)
        want_rows, want_probs, _, want_counts, is_short = case.permuted(PAD, budget)
        used = sum(want_counts)
        assert rows.shape == (budget, 16) and probs.shape == (budget,)
        assert same_bits(rows[:used], want_rows[:used])
        assert same_bits(probs[:used], want_probs[:used])
        assert counts.dtype == torch.int64 and counts.tolist() == want_counts
        flag = handle[-1]
        assert flag.dtype == torch.int32 and flag.shape == (1,)
        assert flag.tolist() == [int(is_short)] == [int(rank == 0 and change < 0)]
        rows[used:] = float("nan")  # nobody reads the slack
        probs[used:] = float("nan")
        out, dense = buffer.combine_with_unpermute(
            hidden=rows, probs=probs, handle=handle, fuse_unpermute_combine=fused
        )
        want, want_dense = case.unpermuted(rows, probs, PAD, budgets)
        assert same_bits(out, want) and same_bits(dense, want_dense)
        # Reuse: the same slots, whether the caller names the size or not.
        for size in (budget, torch.tensor(budget), None):
            again, _, _, _, _ = buffer.dispatch_with_permute(
                hidden=case.hidden, handle=handle, num_permuted_tokens=size
            )
            assert same_bits(again[:used], want_rows[:used])


@pytest.mark.parametrize("change", [-1000, -24, -PAD, 0, PAD, 40])
def test_drops_the_last_slots_and_says_so(ranks, change):
    ranks(fixed, 3, change)


def dropped_whole(rank, num_ranks, group):
    """A token all of whose rows were dropped comes back as zeros."""
    case = Case(rank, num_ranks, group, (6,)).gather()
    buffer = buffer_of(group, case)
    rows, probs, _, counts, handle = dispatch(buffer, case, 0)
    assert rows.shape == (0, 16) and counts.tolist() == [0] * case.local
    assert handle[-1].tolist() == [1]
    out, dense = buffer.combine_with_unpermute(
        hidden=rows, probs=probs, handle=handle, fuse_unpermute_combine=True
    )
    assert out.eq(0).all() and dense.eq(0).all() and out.shape == case.hidden.shape


def test_everything_dropped(ranks):
    ranks(dropped_whole, 2)


def exact_with_size(rank, num_ranks, group):
    """Blocking with a size: enough rows are used as they are, too few raise on every rank."""
    case = Case(rank, num_ranks, group, (9, 4)).gather()
    buffer = buffer_of(group, case)
    _, _, need = case.slots(rank, PAD)
    arguments = {"hidden": case.hidden, "routing_map": case.map, "pad_multiple": PAD}
    want_rows, _, _, want_counts, _ = case.permuted(PAD)
    rows, _, _, counts, handle = buffer.dispatch_with_permute(
        num_permuted_tokens=torch.tensor(need + 3), **arguments
    )
    assert rows.size(0) == need + 3 and same_bits(rows[:need], want_rows)
    assert counts.tolist() == want_counts and handle[-1].tolist() == [0]
    with pytest.raises(weft.InvalidArgument, match=r"rank 1 needs .* rows"):
        buffer.dispatch_with_permute(num_permuted_tokens=need - PAD * (rank == 1), **arguments)
    rows, _, _, _, _ = buffer.dispatch_with_permute(**arguments)  # still usable
    assert same_bits(rows, want_rows)


def test_blocking_never_drops(ranks):
    ranks(exact_with_size, 2)


def late_rows(rank, num_ranks, group):
    """A budget drops an expert's rows of later sources and tokens first."""
    case = Case(rank, num_ranks, group, (5,), local=1, dtype=torch.float32)
    case.map.zero_()
    case.map[:, 0] = True
    case.gather()
    buffer = buffer_of(group, case)
    budget = 8 if rank == 0 else 0
    rows, _, _, _, handle = buffer.dispatch_with_permute(
        hidden=case.hidden, routing_map=case.map, num_permuted_tokens=budget, non_blocking=True
    )
    everybody = torch.cat(gather(group, case.hidden))
    if rank == 0:
        assert same_bits(rows, everybody[:8])
    assert handle.overflow_flag.tolist() == [int(rank == 0)]
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    kept = min(max(8 - 5 * rank, 0), 5)
    assert same_bits(out[:kept], case.hidden[:kept]) and out[kept:].eq(0).all()


def test_late_rows_go_first(ranks):
    ranks(late_rows, 3)
