# SPDX-License-Identifier: Apache-2.0
"""EPBuffer.dispatch and its handle against loops, bit for bit."""

import pytest
import torch
from ep_oracle import Case
from hybrid_ep_oracle import gather, same_bits

import weft
from weft.compat.deep_ep import EPBuffer, EPHandle, EventHandle

HIDDEN = 16


def running(counts):
    return [sum(counts[: i + 1]) for i in range(len(counts))]


def aligned(count, alignment):
    return -(-count // alignment) * alignment


def buffer_of(group, case, **modes):
    return EPBuffer(group, None, case.most, HIDDEN, **modes)


def check_counts(case, handle, alignment, do_cpu_sync):
    counts, arrivals = case.counts(), case.arrivals()
    blocks = [aligned(count, alignment) for count in counts]
    assert handle.num_recv_tokens_per_expert_list == (blocks if do_cpu_sync else [])
    ends = running(blocks)
    if handle.do_expand:
        ends = [end - block + count for end, block, count in zip(ends, blocks, counts)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    per_rank = [sum(s == rank for s, _ in arrivals) for rank in range(case.num_ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == running(per_rank)
    most = case.num_ranks * case.most
    assert handle.num_recv_tokens == (len(arrivals) if do_cpu_sync else most)
    worst = aligned(most * min(case.topk, case.local) + (alignment - 1) * case.local, alignment)
    assert handle.num_expanded_tokens == (sum(blocks) if do_cpu_sync else worst)
    assert handle.num_experts == case.experts and handle.expert_alignment == alignment
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None


def check_metadata(case, handle, alignment, do_cpu_sync):
    arrivals, meta = case.arrivals(), handle.recv_src_metadata
    assert meta.dtype == torch.int32
    most = case.num_ranks * case.most
    assert meta.shape == (len(arrivals) if do_cpu_sync else most, case.topk + 2)
    assert meta[len(arrivals) :].eq(-1).all()
    place = {at: row for row, at in case.expanded(alignment)[0].items()}
    for line, (s, t) in zip(meta.tolist(), arrivals):
        mine = [k for k in range(case.topk) if case.is_mine(int(case.all_idx[s][t, k]))]
        assert line[:2] == [s * case.most + t, s * case.topk + max(mine)]
        rows = [place[s, t, k] if k in mine and handle.do_expand else -1 for k in range(case.topk)]
        assert line[2:] == rows


def plain(rank, num_ranks, group, tokens, do_cpu_sync):
    case = Case(rank, num_ranks, group, tokens).gather()
    buffer = buffer_of(group, case)
    stats = torch.full((case.local,), 5, dtype=torch.int32)
    rows, ids, weights, handle, event = buffer.dispatch(
        case.x,
        case.idx,
        case.weights,
        stats,
        case.experts,
        expert_alignment=4,
        do_cpu_sync=do_cpu_sync,
    )
    assert event.event is None and isinstance(handle, EPHandle)
    want_ids, want_weights = case.received_topk()
    used = len(want_ids)
    has_sync = do_cpu_sync is not False
    assert rows.shape == (used if has_sync else num_ranks * case.most, HIDDEN)
    assert same_bits(rows[:used], case.received(case.all_x))
    assert same_bits(ids[:used], want_ids) and ids[used:].eq(-1).all()
    assert same_bits(weights[:used], want_weights)
    assert stats.tolist() == [5 + count for count in case.counts()]
    check_counts(case, handle, 4, has_sync)
    check_metadata(case, handle, 4, has_sync)
    assert handle.topk_idx is case.idx
    again, again_ids, none, same, _ = buffer.dispatch(case.x, handle=handle)
    assert same is handle and none is None and again_ids is not ids
    assert same_bits(again[:used], rows[:used]) and same_bits(again_ids, ids)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("do_cpu_sync", [None, False])
def test_one_row_for_each_token_on_a_rank(ranks, num_ranks, do_cpu_sync):
    ranks(plain, num_ranks, (7, 0, 12), do_cpu_sync)


def test_nothing(ranks):
    ranks(plain, 2, (0,), None)


def refused(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (7, 3)).gather()
    buffer = buffer_of(group, case)
    with pytest.raises(weft.InvalidArgument, match="expert_alignment = 0 .expected at least 1"):
        alignment = 0 if rank == 1 else 1
        buffer.dispatch(case.x, case.idx, num_experts=case.experts, expert_alignment=alignment)
    idx = case.idx.clone()
    _, _, _, handle, _ = buffer.dispatch(case.x, idx, num_experts=case.experts)
    if rank == 0:
        idx[0, 0] = -1
    with pytest.raises(weft.InvalidArgument, match="must not be modified while the EP handle"):
        buffer.dispatch(case.x, handle=handle)


def test_what_one_rank_passes_wrong_all_hear(ranks):
    ranks(refused, 2)


def another_width(rank, num_ranks, group, do_expand, multiple):
    """Packed rows there, as many elements as were packed back; and once more by the handle."""
    case = Case(rank, num_ranks, group, (7, 0, 12)).gather()
    buffer = buffer_of(group, case, allow_multiple_reduction=multiple)
    packed = case.x.view(torch.uint8)[:, :HIDDEN]
    options = {"num_experts": case.experts, "do_expand": do_expand}
    rows, _, _, handle, _ = buffer.dispatch(packed.contiguous(), case.idx, **options)
    wide = buffer.dispatch(case.x.repeat(1, 3), case.idx, **options)
    y = torch.arange(wide[0].numel()).view(wide[0].shape).to(torch.bfloat16)
    want, _, _ = buffer.combine(y, wide[3])
    for _ in range(2):  # the plan is made once
        out, _, _ = buffer.combine(y, handle)
        assert same_bits(out, want)
    again, *_ = buffer.dispatch(case.x.repeat(1, 3), handle=handle, do_expand=do_expand)
    assert same_bits(again, wide[0])
    same, *_ = buffer.dispatch(packed.contiguous(), handle=handle, do_expand=do_expand)
    assert same_bits(same, rows)


@pytest.mark.parametrize("do_expand, multiple", [(False, True), (True, True), (True, False)])
def test_rows_of_another_width_return(ranks, do_expand, multiple):
    ranks(another_width, 3, do_expand, multiple)


def another_width_on_one_rank(rank, num_ranks, group, is_known):
    """They are told of calls out of step, and not left to their deadlines."""
    case = Case(rank, num_ranks, group, (7, 0, 12)).gather()
    buffer = buffer_of(group, case)
    rows, _, _, handle, _ = buffer.dispatch(case.x, case.idx, num_experts=case.experts)
    wide = rows.repeat(1, 2)
    want, _, _ = buffer.combine(rows, handle)
    if is_known:
        buffer.combine(wide, handle)
    is_other = rank == num_ranks - 1
    told = "dispatch: rank 0 calls combine" if is_other else "combine: rank 2 calls dispatch"
    with pytest.raises(weft.Error, match=told):
        buffer.combine(wide if is_other else rows, handle)
    with pytest.raises(weft.Error, match="dtype of x = "):
        buffer.dispatch(case.x.repeat(1, 1 + is_other), handle=handle)
    out, _, _ = buffer.combine(rows, handle)
    assert same_bits(out, want)


@pytest.mark.parametrize("is_known", [False, True])
def test_rows_of_another_width_on_one_rank(ranks, is_known):
    ranks(another_width_on_one_rank, 3, is_known)


def expand(rank, num_ranks, group, do_cpu_sync, multiple):
    case = Case(rank, num_ranks, group, (7, 0, 12), fp8=True).gather()
    buffer = buffer_of(group, case, allow_multiple_reduction=multiple, deterministic=True)
    x = (case.x.view(torch.float8_e4m3fn), case.sf.t().contiguous().t())
    (rows, sf), ids, weights, handle, _ = buffer.dispatch(
        x,
        case.idx,
        case.weights,
        num_experts=case.experts,
        expert_alignment=8,
        do_cpu_sync=do_cpu_sync,
        do_expand=True,
        do_zero_padding=True,
        use_tma_aligned_col_major_sf=True,
        emit_expert_ids=True,
    )
    table, needed = case.expanded(8)
    worst = num_ranks * case.most * min(case.topk, case.local) + 7 * case.local
    num_rows = needed if do_cpu_sync else aligned(worst, 8)
    want = torch.zeros(needed, HIDDEN, dtype=torch.uint8)
    want_weights, want_sf = torch.zeros(needed), torch.zeros(needed, 2)
    want_ids = torch.full((num_rows,), -1, dtype=torch.int32)
    for row, (s, t, k) in table.items():
        want[row], want_sf[row] = case.all_x[s][t], case.all_sf[s][t]
        want_weights[row] = case.all_weights[s][t, k]
        want_ids[row] = int(case.all_idx[s][t, k]) - rank * case.local
    assert rows.dtype == torch.float8_e4m3fn and rows.shape == (num_rows, HIDDEN) and ids is None
    assert same_bits(rows[:needed].view(torch.uint8), want)
    assert same_bits(sf[:needed], want_sf) and sf.stride() == (1, aligned(num_rows, 4))
    assert same_bits(weights[:needed], want_weights) and same_bits(handle.recv_expert_ids, want_ids)
    check_counts(case, handle, 8, do_cpu_sync)
    check_metadata(case, handle, 8, do_cpu_sync)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("multiple", [True, False])
def test_one_row_for_each_choice(ranks, num_ranks, do_cpu_sync, multiple):
    ranks(expand, num_ranks, do_cpu_sync, multiple)


def choices_stay(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (4, 5)).gather()
    buffer = buffer_of(group, case)
    rows, _, _, handle, _ = buffer.dispatch(case.x, case.idx, num_experts=case.experts)
    assert handle.topk_idx is case.idx
    case.idx[0, 0] = -1
    said = "`topk_idx` must not be modified while the EP handle is in use"
    with pytest.raises(AssertionError, match=said):
        _ = handle.topk_idx
    with pytest.raises(AssertionError, match=said):
        buffer.combine(rows, handle)
    with torch.inference_mode():
        idx = case.idx.clone()
        _, _, _, handle, _ = buffer.dispatch(case.x, idx, num_experts=case.experts)
        idx[0, 0] = -1
        assert handle.topk_idx is idx


def test_choices_must_stay(ranks):
    ranks(choices_stay, 2)


def refusals(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (4,)).gather()
    buffer = buffer_of(group, case)

    def refuses(match, x=case.x, **arguments):
        with pytest.raises(AssertionError, match=match) as found:
            buffer.dispatch(x, **arguments)
        assert isinstance(found.value, weft.InvalidArgument)

    given = {"topk_idx": case.idx, "num_experts": case.experts}
    refuses("expected it or a handle")
    refuses("num_experts is None", topk_idx=case.idx)
    refuses("Allocated QPs are not enough", num_qps=1000, **given)
    refuses("without allocate_on_comm_stream", previous_event=EventHandle(), **given)
    refuses("a handle is not copied", do_handle_copy=True, **given)
    refuses("do_zero_padding without do_expand", do_zero_padding=True, **given)
    refuses("emit_expert_ids without do_expand", emit_expert_ids=True, **given)
    refuses("defer_epilogue without async", defer_epilogue=True, **given)
    refuses("num_sms = -2", num_sms=-2, **given)
    rows, _, _, handle, _ = buffer.dispatch(case.x, **given)
    refuses("beside a handle", topk_idx=case.idx, handle=handle)
    refuses("Cannot do CPU sync with cached handle", do_cpu_sync=True, handle=handle)
    refuses("expert_alignment = 4", expert_alignment=4, handle=handle)
    refuses("do_expand = True", do_expand=True, handle=handle)
    refuses("expected what EPBuffer.dispatch returned", handle=(1,))
    with pytest.raises(AssertionError, match="bias has shape"):
        buffer.combine(rows, handle, bias=case.x[:1, :8])
    with pytest.raises(AssertionError, match="topk_weights"):
        buffer.combine(rows, handle, topk_weights=case.weights[:, :1])
    again, _, _, _, event = buffer.dispatch(
        case.x,
        handle=handle,
        previous_event=buffer.capture(),
        allocate_on_comm_stream=True,
        async_with_compute_stream=True,
    )
    event.wait()
    assert same_bits(again, rows) and gather(group, rank) == list(range(num_ranks))


def test_what_is_refused(ranks):
    ranks(refusals, 2)
