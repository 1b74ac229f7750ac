# SPDX-License-Identifier: Apache-2.0
"""Handles of HybridEPBuffer: many alive, their items, and what they refuse."""

import pytest
import torch
from hybrid_ep_oracle import Case, same_bits

import weft
from weft.compat.deep_ep.hybrid_ep import HybridEPBuffer


def out_of_order(rank, num_ranks, group):
    cases = [Case(rank, num_ranks, group, (3 + 4 * i, i, 8), seed=i).gather() for i in range(4)]
    buffer = HybridEPBuffer(group, 16, 64, 4)
    made = [
        buffer.dispatch_with_permute(
            hidden=case.hidden, routing_map=case.map, probs=case.probs, pad_multiple=2 + i
        )
        for i, case in enumerate(cases)
    ]
    plain = [buffer.dispatch(case.hidden, routing_map=case.map) for case in cases]
    for i in (2, 0, 3, 1, 0):
        case, (rows, probs, _, _, handle) = cases[i], made[i]
        assert same_bits(rows, case.permuted(2 + i)[0])
        out, dense = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        assert same_bits(out, case.unpermuted(rows, probs, 2 + i)[0])
        assert same_bits(dense, case.probs)
        again, _, _, _, _ = buffer.dispatch_with_permute(hidden=-case.hidden, handle=handle)
        assert same_bits(again, -case.permuted(2 + i)[0] + 0.0)
        rows, _, _, handle = plain[i]
        assert same_bits(buffer.dispatch(case.hidden, handle=handle)[0], rows)


def test_several_handles_live_at_once(ranks):
    ranks(out_of_order, 3)


def items(rank, num_ranks, group, non_blocking):
    case = Case(rank, num_ranks, group, (7, 0, 5)).gather()
    buffer = HybridEPBuffer(group, 16, 64, 4)
    _, _, _, _, handle = buffer.dispatch_with_permute(
        hidden=case.hidden,
        routing_map=case.map,
        pad_multiple=4,
        num_permuted_tokens=400 if non_blocking else None,
        non_blocking=non_blocking,
    )
    assert len(handle) == 11 and len(list(handle)) == 11
    s2d, r2a, a2r, count, local_map, chunks, to_row, raw, num_tokens, config, flag = handle
    arrivals = case.arrivals(rank)
    mine = slice(rank * case.local, (rank + 1) * case.local)
    want = torch.stack([case.maps[s][t, mine] for s, t in arrivals]) if arrivals else local_map
    assert count.tolist() == [len(arrivals)] and count.dtype == torch.int32
    assert same_bits(local_map, want) and local_map.shape == (len(arrivals), 4)
    kept, _, _ = case.slots(rank, 4)
    for n, (source, t) in enumerate(arrivals):
        for expert in range(4):
            row = [r for r, s, u, e in kept if (s, u, e) == (source, t, expert)]
            assert to_row[n, expert] == (row[0] if row else -1)
    assert raw.dtype == torch.int32
    assert raw.tolist() == sum(m[:, mine].sum(0) for m in case.maps).tolist()
    assert num_tokens == case.hidden.size(0) and handle[8] == num_tokens
    assert config.pad_multiple == 4 and config.hidden_dim == 16
    assert flag.tolist() == [0] and same_bits(handle[-1], flag)
    assert handle[7:9][1] == num_tokens
    assert a2r.dtype == torch.bool and a2r.shape == (num_tokens, 0)  # there is no other node
    for private in (s2d, r2a, chunks):
        with pytest.raises(AttributeError, match="not kept by Weft"):
            _ = private.shape
    with pytest.raises(IndexError):
        handle[11]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_items_can_be_unpacked(ranks, non_blocking):
    ranks(items, 3, non_blocking)


def refusals(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (4,)).gather()
    buffer = HybridEPBuffer(group, 16, 64, 4)
    given = {"hidden": case.hidden, "routing_map": case.map}

    def refuses(match, call=buffer.dispatch_with_permute, **arguments):
        with pytest.raises(weft.InvalidArgument, match=match):
            call(**arguments)

    refuses("required for non-blocking mode", non_blocking=True, **given)
    refuses("expected at least 0", non_blocking=True, num_permuted_tokens=-4, **given)
    refuses(
        "multiple of pad_multiple",
        non_blocking=True,
        num_permuted_tokens=6,
        pad_multiple=4,
        **given,
    )
    refuses("expected an integer", num_permuted_tokens="many", **given)
    refuses("no routing", hidden=case.hidden)
    refuses("expected bool", hidden=case.hidden, routing_map=case.map.int())
    refuses(r"expected bool \[T, 12\]", num_of_experts=12, **given)
    refuses("expected 8 with 2 ranks", num_of_experts=12, num_of_experts_per_rank=4, **given)
    refuses("one-byte dtype", use_fp8=True, **given)
    refuses("dtype", hidden=case.hidden, routing_map=case.map, probs=case.probs.double())
    with pytest.raises(AssertionError, match="hidden has 2 rows .expected 4, as the routing has"):
        buffer.dispatch_with_permute(hidden=case.hidden[:2], routing_map=case.map)
    wrong = torch.tensor([[0, 1], [2, -1], [3, 8 if rank == 1 else 7], [4, 4]])
    refuses("8|rank 1", hidden=case.hidden, topk_idx=wrong)  # on every rank
    refuses("int64 or int32", hidden=case.hidden, topk_idx=wrong.float())
    crowd = torch.ones(4, 40, dtype=torch.bool)
    refuses("names 40 experts", hidden=case.hidden, routing_map=crowd)
    rows, _, _, _, handle = buffer.dispatch_with_permute(pad_multiple=4, **given)
    refuses("the handle has 4", hidden=case.hidden, handle=handle, pad_multiple=8)
    refuses("the handle has", hidden=case.hidden, handle=handle, num_permuted_tokens=1000)
    refuses(
        "expected one of dispatch_with_permute",
        buffer.combine_with_unpermute,
        hidden=rows,
        handle=(1, 2),
    )
    with pytest.raises(AssertionError, match="hidden has shape"):
        buffer.combine_with_unpermute(hidden=rows[1:], handle=handle)
    refuses("expected one of dispatch", buffer.combine, hidden=rows, handle=handle)
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)  # usable after all that
    assert same_bits(out, case.unpermuted(rows, None, 4)[0])


def test_what_is_refused(ranks):
    ranks(refusals, 2)
