# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer.dispatch against loops, bit for bit: one row for each token, and expanded."""

import pytest
import torch
from elastic_oracle import Case
from hybrid_ep_oracle import same_bits

import weft
from weft.compat.deep_ep import EPBuffer
from weft.compat.deep_ep.elastic import ElasticBuffer, EPHandle
from weft.compat.deep_ep.utils import EventHandle, EventOverlap


def running(counts):
    return [sum(counts[: i + 1]) for i in range(len(counts))]


def aligned(count, alignment):
    return -(-count // alignment) * alignment


def check_handle(case, handle, alignment, do_expand, num_rows):
    assert isinstance(handle, EPHandle)
    assert handle.do_expand == do_expand and handle.num_experts == case.experts
    assert handle.expert_alignment == alignment
    assert handle.num_max_tokens_per_rank == case.most
    assert same_bits(handle.topk_idx, case.idx)
    arrivals, counts = case.arrivals(), case.counts()
    per_rank = [sum(s == rank for s, _ in arrivals) for rank in range(case.num_ranks)]
    psum = handle.psum_num_recv_tokens_per_scaleup_rank
    assert psum.dtype == torch.int32 and psum.tolist() == running(per_rank)
    blocks = [aligned(count, alignment) for count in counts]
    ends = running(blocks)
    if do_expand:
        ends = [end - block + count for end, block, count in zip(ends, blocks, counts, strict=True)]
    psum = handle.psum_num_recv_tokens_per_expert
    assert psum.dtype == torch.int32 and psum.tolist() == ends
    raw = handle.num_unaligned_recv_tokens_per_expert
    assert raw.dtype == torch.int32 and raw.tolist() == counts
    meta = handle.recv_src_metadata
    assert meta.dtype == torch.int32 and meta.size(1) == case.topk + 2
    names = [s * case.most + t for s, t in arrivals]
    assert meta[: len(names), 0].tolist() == names
    if do_expand:
        table, _ = case.expanded(alignment)
        slots = torch.full((len(names), case.topk), -1, dtype=torch.int32)
        for row, (s, t, k) in table.items():
            slots[arrivals.index((s, t)), k] = row
        assert meta.size(0) == len(names) and same_bits(meta[:, 2:].contiguous(), slots)
        assert handle.num_expanded_tokens == num_rows
    else:
        assert meta.size(0) == num_rows and meta[:, 2:].eq(-1).all()
    table = torch.full((case.idx.size(0), case.topk), -1, dtype=torch.int32)
    for rank in range(case.num_ranks):
        if do_expand:
            for row, (s, t, k) in case.expanded(alignment, rank)[0].items():
                if s == case.rank:
                    table[t, k] = row
        else:
            for row, (s, t) in enumerate(case.arrivals(rank)):
                for k in range(case.topk):
                    if s == case.rank and case.is_mine(int(case.idx[t, k]), rank):
                        table[t, k] = row
    assert same_bits(handle.dst_buffer_slot_idx, table)
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None


def plain(rank, num_ranks, group, tokens, alignment, with_weights, do_cpu_sync):
    case = Case(rank, num_ranks, group, tokens).gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=case.most, hidden=16, num_topk=3)
    stats = torch.full((case.local,), 5, dtype=torch.int32)
    rows, ids, weights, handle, event = buffer.dispatch(
        case.x,
        case.idx,
        case.weights if with_weights else None,
        stats,
        num_experts=case.experts,
        expert_alignment=alignment,
        do_cpu_sync=do_cpu_sync,
    )
    assert isinstance(event, EventOverlap) and event.event is None
    want_ids, want_weights = case.received_topk()
    used = want_ids.size(0)
    has_sync = do_cpu_sync is not False
    num_rows = used if has_sync else num_ranks * case.most
    assert rows.shape == (num_rows, 16) and same_bits(rows[:used], case.received(case.all_x))
    assert same_bits(ids[:used], want_ids) and ids[used:].eq(-1).all()
    if with_weights:
        assert same_bits(weights[:used], want_weights)
    else:
        assert weights is None
    assert stats.tolist() == [5 + count for count in case.counts()]
    blocks = [aligned(count, alignment) for count in case.counts()]
    assert handle.num_recv_tokens_per_expert_list == (blocks if has_sync else [])
    assert handle.num_recv_tokens == num_rows
    check_handle(case, handle, alignment, False, num_rows)
    # The same again by its handle, forward-like and backward-like.
    again, again_ids, again_weights, same, _ = buffer.dispatch(case.x, handle=handle)
    assert same is handle and again_weights is None
    assert same_bits(again[:used], rows[:used]) and same_bits(again_ids, ids)
    _, _, again_weights, _, _ = buffer.dispatch(case.x, topk_weights=case.weights, handle=handle)
    assert same_bits(again_weights[:used], want_weights)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("do_cpu_sync", [None, False])
@pytest.mark.parametrize("alignment", [1, 8])
def test_one_row_for_each_token(ranks, num_ranks, do_cpu_sync, alignment):
    ranks(plain, num_ranks, (11, 0, 6), alignment, True, do_cpu_sync)


def test_without_weights(ranks):
    ranks(plain, 2, (4, 9), 1, False, True)


@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_nobody_has_tokens(ranks, do_cpu_sync):
    ranks(plain, 2, (0,), 4, True, do_cpu_sync)


def expand(rank, num_ranks, group, tokens, alignment, do_cpu_sync, fp8):
    case = Case(rank, num_ranks, group, tokens, fp8=fp8).gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=1)
    x = (case.x.view(torch.float8_e4m3fn), case.sf.t().contiguous().t()) if fp8 else case.x
    stats = torch.zeros(case.local, dtype=torch.int32)
    arguments = {
        "do_expand": True,
        "do_zero_padding": True,
        "use_tma_aligned_col_major_sf": True,
    }
    got, ids, weights, handle, _ = buffer.dispatch(
        x,
        case.idx,
        case.weights,
        stats,
        num_experts=case.experts,
        num_max_tokens_per_rank=case.most,
        expert_alignment=alignment,
        do_cpu_sync=do_cpu_sync,
        **arguments,
    )
    table, needed = case.expanded(alignment)
    num_rows = needed
    if not do_cpu_sync:
        worst = num_ranks * case.most * min(case.topk, case.local) + (alignment - 1) * case.local
        num_rows = aligned(worst, alignment)
    want = torch.zeros(needed, 16, dtype=case.x.dtype)
    want_weights, want_sf = torch.zeros(needed), torch.zeros(needed, 2)
    for row, (s, t, k) in table.items():
        want[row] = case.all_x[s][t]
        want_weights[row] = case.all_weights[s][t, k]
        want_sf[row] = case.all_sf[s][t]

    def check_rows(got, weights):
        rows, sf = got if fp8 else (got, None)
        assert rows.size(0) == num_rows and same_bits(rows[:needed].view(case.x.dtype), want)
        assert weights.shape == (num_rows,) and same_bits(weights[:needed], want_weights)
        if fp8:
            assert sf.shape == (num_rows, 2)
            assert num_rows == 0 or (sf.stride(0) == 1 and sf.stride(1) % 4 == 0)
            assert same_bits(sf[:needed], want_sf)

    check_rows(got, weights)
    assert ids is None and stats.tolist() == case.counts()
    blocks = [aligned(count, alignment) for count in case.counts()]
    assert handle.num_recv_tokens_per_expert_list == (blocks if do_cpu_sync else [])
    most = num_ranks * case.most
    assert handle.num_recv_tokens == (len(case.arrivals()) if do_cpu_sync else most)
    check_handle(case, handle, alignment, True, num_rows)
    got, ids, weights, same, _ = buffer.dispatch(
        x, topk_weights=case.weights, handle=handle, **arguments
    )
    assert same is handle and ids is None
    check_rows(got, weights)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("fp8", [True, False])
def test_one_row_for_each_choice(ranks, num_ranks, do_cpu_sync, alignment, fp8):
    ranks(expand, num_ranks, (7, 0, 10), alignment, do_cpu_sync, fp8)


def test_expanding_nothing(ranks):
    ranks(expand, 2, (0,), 4, True, True)


def scales(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (9, 5), fp8=True).gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=case.most)
    packed = (case.sf * 1000).to(torch.int32)
    for sf, like in ((case.sf, case.all_sf), (packed[:, :1].t().contiguous().t(), None)):
        (rows, got), _, _, handle, _ = buffer.dispatch(
            (case.x, sf), case.idx, num_experts=case.experts
        )
        assert same_bits(rows, case.received(case.all_x)) and got.is_contiguous()
        like = like or [(one * 1000).to(torch.int32)[:, :1] for one in case.all_sf]
        assert same_bits(got, case.received(like))
        (again, again_sf), _, _, _, _ = buffer.dispatch((case.x, sf), handle=handle)
        assert same_bits(again, rows) and same_bits(again_sf, got)


def test_scaling_factors_of_any_strides(ranks):
    ranks(scales, 2)


def same_expert_twice(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (6,), topk=4).gather()
    case.idx[:, 3] = case.idx[:, 0]
    case.gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=case.most)
    _, _, weights, handle, _ = buffer.dispatch(
        case.x, case.idx.int(), case.weights, num_experts=case.experts, do_expand=True
    )
    check = handle.recv_src_metadata[:, 2:]
    table, _ = case.expanded(1)
    for row, (s, t, k) in table.items():
        line = case.arrivals().index((s, t))
        assert check[line, k] == row and weights[row] == case.all_weights[s][t, k]


def test_an_expert_chosen_twice_has_two_rows(ranks):
    ranks(same_expert_twice, 2)


def live_handles(rank, num_ranks, group):
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=32)
    cases = [Case(rank, num_ranks, group, (3, 8, 5), seed=i).gather() for i in range(3)]
    made = [
        buffer.dispatch(
            case.x,
            case.idx,
            num_experts=case.experts,
            do_expand=i % 2 == 1,
            num_max_tokens_per_rank=case.most,
            do_handle_copy=i != 0,
        )
        for i, case in enumerate(cases)
    ]
    for i in (1, 2, 0, 1):
        rows, _, _, handle, _ = made[i]
        assert same_bits(buffer.dispatch(cases[i].x, handle=handle)[0], rows)
        shared = handle.topk_idx.data_ptr() == cases[i].idx.data_ptr()
        assert shared == (i == 0)


def test_several_handles_live_at_once(ranks):
    ranks(live_handles, 3)


def refusals(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (4,)).gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=case.most)

    def refuses(match, x=case.x, **arguments):
        with pytest.raises(weft.InvalidArgument, match=match):
            buffer.dispatch(x, **arguments)

    refuses("expected it or a handle")
    refuses("num_experts is None", topk_idx=case.idx)
    given = {"topk_idx": case.idx, "num_experts": case.experts}
    refuses("num_qps = 1000", num_qps=1000, **given)
    refuses("without allocate_on_comm_stream", previous_event=EventHandle(), **given)
    refuses("int64 or int32", topk_idx=case.idx.float(), num_experts=case.experts)
    most = 3 if rank == 1 else 4  # rank 1 has more tokens than that; all raise
    refuses(
        "at most num_max_tokens_per_rank = 3|rank 1|routing", num_max_tokens_per_rank=most, **given
    )
    wrong = case.idx.clone()
    wrong[0, 0] = case.experts if rank == 0 else 0
    refuses("8|rank 0", topk_idx=wrong, num_experts=case.experts)
    rows, _, _, handle, _ = buffer.dispatch(case.x, expert_alignment=2, **given)
    refuses("beside a handle", topk_idx=case.idx, handle=handle)
    refuses("Cannot do CPU sync with cached handle", do_cpu_sync=True, handle=handle)
    refuses("expert_alignment = 4", expert_alignment=4, handle=handle)
    refuses("num_experts = 99", num_experts=99, handle=handle)
    refuses("do_expand = True", do_expand=True, handle=handle)
    refuses("expected what dispatch returned", handle=(1,))
    again, _, _, _, event = buffer.dispatch(
        case.x,
        handle=handle,
        previous_event=buffer.capture(),
        allocate_on_comm_stream=True,
        async_with_compute_stream=True,
        previous_event_before_epilogue=buffer.capture(),
    )
    event.current_stream_wait()
    assert same_bits(again, rows)


def different_most(rank, num_ranks, group, kind):
    """All ranks hear of a new num_max_tokens_per_rank that differs, and of too many tokens."""
    x, idx = torch.ones(3, 16), torch.tensor([[0], [1], [3]])
    buffer = kind(group, num_max_tokens_per_rank=8, hidden=16)

    def refuses(match, most, there=AssertionError):
        with pytest.raises(weft.InvalidArgument, match=match) as found:
            buffer.dispatch(x, idx, num_experts=4, num_max_tokens_per_rank=most)
        assert there is None or isinstance(found.value, there)

    def wants(most):
        _, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, num_max_tokens_per_rank=most)
        assert handle.num_max_tokens_per_rank == (8 if most is None else most)

    most = (8, 4)
    text = f"num_max_tokens_per_rank = {most[rank]} here and {most[1 - rank]} on rank {1 - rank}"
    refuses(f"dispatch: {text} \\(must be equal on all ranks\\)", most[rank])
    wants(None)
    refuses("must be equal on all ranks", (None, 4)[rank], there=None)
    wants(4)
    wants(9000)  # needs more memory
    refuses("num_max_tokens_per_rank = ", 9001 + rank)
    if rank == 0:
        refuses("x has 3 tokens \\(at most num_max_tokens_per_rank = 2\\)", 2)
    else:
        refuses("rank 0 refused the call: dispatch: x has 3 tokens", 5, there=None)
    wants(3)


@pytest.mark.parametrize("kind", [ElasticBuffer, EPBuffer])
def test_ranks_have_the_same_largest_number(ranks, kind):
    ranks(different_most, 2, kind)


def test_what_is_refused(ranks):
    ranks(refusals, 2)
