# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine of `Buffer` against loops over everybody's inputs, bit for bit."""

import contextlib

import pytest
import torch
from buffer_cases import Case, dispatch, gather

from domain_cases import DOMAINS, two_domains
from weft.compat.deep_ep import Buffer
from weft.compat.deep_ep.handles import Handle
from weft.compat.deep_ep.layout import Hosts, layout_of, routes_to_ranks

TOKENS = (17, 0, 5, 9)


def layout(rank, num_ranks, group):
    case = Case(rank, group, 4 * num_ranks, 3, TOKENS, low=-2)
    buffer = Buffer(group)
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
        case.idx, case.num_experts
    )
    tokens = [case.tokens_of(rank, r) for r in range(num_ranks)]
    assert per_rank.dtype == per_expert.dtype == torch.int32
    assert per_rank.tolist() == [len(found) for found in tokens]
    assert per_rdma is None and event.event is None
    flat = case.idx.flatten().tolist()
    assert per_expert.tolist() == [flat.count(e) for e in range(case.num_experts)]
    assert in_rank.dtype == torch.bool and in_rank.shape == (case.x.size(0), num_ranks)
    assert [in_rank[:, r].nonzero().flatten().tolist() for r in range(num_ranks)] == tokens


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_layout_counts_tokens_and_choices(ranks, num_ranks):
    ranks(layout, num_ranks)


def round_trip(rank, num_ranks, group, topk, tokens, low):
    case = Case(rank, group, 4 * num_ranks, topk, tokens, low=low)
    buffer = Buffer(group, num_nvl_bytes=1 << 20)
    recv_x, recv_idx, recv_weights, counts, handle, event = dispatch(
        buffer, case, expert_alignment=4
    )
    assert event.event is None
    assert recv_x.dtype == torch.bfloat16 and torch.equal(recv_x, case.rows(case.all_x))
    assert recv_idx.dtype == torch.int64 and torch.equal(recv_idx, case.row_idx())
    assert recv_weights.dtype == torch.float32 and torch.equal(recv_weights, case.row_weights())
    assert counts == case.counts(4) and isinstance(counts, list)
    assert torch.equal(handle[0][:, rank], case.prefix()[:, rank])
    assert len(handle) == 6 and torch.equal(
        handle[4], buffer.get_dispatch_layout(case.idx, case.num_experts)[3]
    )
    check_private_items(handle, case)

    again = buffer.dispatch(recv_x.new_tensor(case.x), handle=handle)
    assert torch.equal(again[0], recv_x) and again[1:5] == (None, None, None, None)

    out, weights, event = buffer.combine(recv_x, handle, topk_weights=recv_weights)
    assert event.event is None and out.dtype == torch.bfloat16
    assert torch.equal(out, case.summed(gather(group, recv_x)))
    is_choice = (case.idx >= 0) & (case.idx < case.num_experts)
    assert torch.equal(weights, torch.where(is_choice, case.weights, torch.zeros(())))

    gen = torch.Generator().manual_seed(rank)
    rows = torch.randn(recv_x.shape, generator=gen).to(torch.bfloat16)
    biases = tuple(torch.randn(case.x.shape, generator=gen).to(torch.bfloat16) for _ in range(2))
    all_rows = gather(group, rows)
    out, weights, _ = buffer.combine(rows, handle)
    assert weights is None and torch.equal(out, case.summed(all_rows))
    out, _, _ = buffer.combine(rows, handle, bias=biases[0])
    assert torch.equal(out, case.summed(all_rows, biases[:1]))
    out, _, _ = buffer.combine(rows, handle, bias=biases)
    assert torch.equal(out, case.summed(all_rows, biases))


def sums_of_slots(case, group, weights, domains):
    """Sums over all ranks in each slot of this rank's tokens: by rank, then domain."""
    all_weights = gather(group, weights)
    total = torch.zeros_like(case.weights)
    for domain in domains:
        part = torch.zeros_like(total)
        for rank in domain:
            for row, (source, token) in enumerate(case.arrivals(rank)):
                if source == case.rank:
                    part[token] += all_weights[rank][row]
        total += part
    return total


def filled_slots(rank, num_ranks, group, topk, hidden, num_worst_tokens):
    """Every slot of a row holds a number, whoever has its expert."""
    with two_domains() if num_ranks == 4 else contextlib.nullcontext(group) as group:
        domains = DOMAINS if num_ranks == 4 else [range(num_ranks)]
        case = Case(rank, group, 4 * num_ranks, topk, TOKENS, hidden=hidden)
        buffer = Buffer(group)
        recv_x, recv_idx, _, _, handle, _ = dispatch(
            buffer, case, num_worst_tokens=num_worst_tokens
        )
        gen = torch.Generator().manual_seed(rank)
        weights = torch.randn(recv_idx.shape, generator=gen)
        weights[len(case.arrivals(rank)) :] = float("nan")  # what is not in use is not read
        want = sums_of_slots(case, group, weights, domains)
        kept = sums_of_slots(case, group, weights.masked_fill(recv_idx < 0, 0), domains)
        rows, back, _ = buffer.combine(recv_x, handle, topk_weights=weights, bias=case.x)
        assert torch.equal(back, kept) and torch.equal(back, want) == (len(case.x) == 0)
        try:
            Buffer.sums_topk_weights = True
            same, back, _ = buffer.combine(recv_x, handle, topk_weights=weights, bias=case.x)
            none = buffer.combine(recv_x, handle)[1]
        finally:
            Buffer.sums_topk_weights = False
        assert torch.equal(back, want) and torch.equal(rows, same) and none is None


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_of_what_all_ranks_have_in_a_slot(ranks, num_ranks):
    ranks(filled_slots, num_ranks, 3, 32, 0)


def test_sums_of_more_slots_than_a_row_has_elements(ranks):
    ranks(filled_slots, 2, 20, 8, 0)


def test_sums_without_slots_that_are_not_in_use(ranks):
    ranks(filled_slots, 3, 3, 32, 100)


def other_names(rank, num_ranks, group):
    """The ways that `dispatch` and `combine` of `deep_ep` choose between."""
    case = Case(rank, group, 2 * num_ranks, 2, TOKENS)
    buffer = Buffer(group, allow_nvlink_for_normal_mode=False)
    layout = buffer.get_dispatch_layout(case.idx, case.num_experts)[:4]
    per_rank, per_rdma, per_expert, in_rank = layout
    for way in ("internode", "pcie"):
        names = (f"{way}_dispatch", f"{way}_combine")
        names = names if hasattr(buffer, names[0]) else (f"dispatch_{way}", f"combine_{way}")
        dispatch_so, combine_so = (getattr(buffer, name) for name in names)
        given = (None, per_rank, per_rdma, in_rank, per_expert, case.idx, case.weights, 4)
        recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch_so(case.x, *given)
        assert torch.equal(recv_x, case.rows(case.all_x)) and torch.equal(recv_idx, case.row_idx())
        assert torch.equal(recv_weights, case.row_weights()) and counts == case.counts(4)
        assert torch.equal(dispatch_so(case.x, handle)[0], recv_x)
        out, weights, _ = combine_so(recv_x, handle, recv_weights, case.x)
        assert torch.equal(out, case.summed(gather(group, recv_x), (case.x,)))
        assert torch.equal(weights, torch.where(case.idx >= 0, case.weights, 0.0))


def test_calls_for_one_way_are_those_for_all(ranks):
    ranks(other_names, 2)


def check_private_items(handle, case):
    """Checks the private items of the handle of a dispatch with 20 multiprocessors."""
    _, sent, received, src_idx, in_rank, head = handle
    R = case.num_ranks
    sources = [len(case.tokens_of(s, case.rank)) for s in range(R)]
    assert sent.shape == received.shape == (R, 10)
    assert torch.equal(sent, in_rank.sum(0, dtype=torch.int32).unsqueeze(1).expand(R, 10))
    assert received.dtype == torch.int32 and received.tolist() == [[n] * 10 for n in sources]
    assert src_idx.dtype == torch.int32
    assert src_idx.tolist() == [token for _, token in case.arrivals(case.rank)]
    assert head.dtype == torch.int32 and head.shape == in_rank.shape
    for r in range(R):
        assert head[:, r][in_rank[:, r]].tolist() == list(range(int(in_rank[:, r].sum())))
    assert (head[~in_rank] == -1).all()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_round_trip(ranks, num_ranks):
    ranks(round_trip, num_ranks, 3, TOKENS, -1)


@pytest.mark.parametrize("topk", [1, 32])
def test_fewest_and_most_choices(ranks, topk):
    ranks(round_trip, 2, topk, (9, 4), -1)


def test_ids_that_name_no_expert_are_ignored(ranks):
    ranks(round_trip, 3, 4, TOKENS, -3)


def test_no_tokens_at_all(ranks):
    ranks(round_trip, 2, 2, (0,), -1)


def rank_without_rows(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 2, (7, 3, 4))
    last = case.num_experts - 1
    for idx in (case.idx, *case.all_idx):
        idx[idx >= last - 1] = -1
    buffer = Buffer(group)
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(buffer, case)
    assert torch.equal(recv_x, case.rows(case.all_x)) and torch.equal(recv_idx, case.row_idx())
    if rank == num_ranks - 1:
        assert recv_x.size(0) == 0 and counts == [0, 0]
    out, weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
    assert torch.equal(out, case.summed(gather(group, recv_x)))
    assert torch.equal(weights, torch.where(case.idx >= 0, case.weights, torch.zeros(())))


def test_rank_that_receives_nothing(ranks):
    ranks(rank_without_rows, 3)


def without_topk(rank, num_ranks, group):
    case = Case(rank, group, 4 * num_ranks, 3, TOKENS)
    buffer = Buffer(group)
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(buffer, case, with_topk=False)
    assert torch.equal(recv_x, case.rows(case.all_x))
    assert recv_idx is None and recv_weights is None and counts == case.counts()
    assert torch.equal(handle[0][:, rank], case.prefix()[:, rank])
    out, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(out, case.summed(gather(group, recv_x)))
    with pytest.raises(AssertionError, match="no top-k"):
        buffer.combine(recv_x, handle, topk_weights=torch.zeros(recv_x.size(0), 3))


def test_layout_alone_is_enough(ranks):
    ranks(without_topk, 3)


def worst_case(rank, num_ranks, group):
    case = Case(rank, group, 4 * num_ranks, 3, TOKENS, low=-2)
    buffer = Buffer(group)
    bound = max(TOKENS) * num_ranks
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(
        buffer, case, num_worst_tokens=bound
    )
    want = case.rows(case.all_x)
    used = want.size(0)
    assert recv_x.size(0) == recv_idx.size(0) == recv_weights.size(0) == bound and counts == []
    assert torch.equal(recv_x[:used], want) and torch.equal(recv_idx[:used], case.row_idx())
    assert torch.equal(recv_weights[:used], case.row_weights())
    assert (recv_idx[used:] == -1).all()
    tokens = [token for _, token in case.arrivals(rank)]
    assert handle.recv_src_idx.tolist() == tokens + [-1] * (bound - used)
    recv_x[used:] = float("nan")
    out, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(
        out,
        case.summed(
            [rows[: len(case.arrivals(r))] for r, rows in enumerate(gather(group, recv_x))]
        ),
    )
    again = buffer.dispatch(case.x, handle=handle)[0]
    assert again.size(0) == bound and torch.equal(again[:used], want)


def test_worst_case_number_of_rows(ranks):
    ranks(worst_case, 3)


def fp8(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 2, (6, 0, 11), hidden=256)
    buffer = Buffer(group)
    bytes_ = torch.randint(0, 120, (case.x.size(0), 256), dtype=torch.uint8)
    x = bytes_.view(torch.float8_e4m3fn)
    for cols in (2, 1):  # a single column is contiguous to torch whatever its stride
        scales = torch.randn(cols, case.x.size(0)).t()
        for given in (scales, scales.contiguous(), torch.randn(case.x.size(0), 3 * cols)[:, ::3]):
            recv, recv_idx, _, _, handle, _ = dispatch(buffer, case, (x, given))
            assert isinstance(recv, tuple) and recv[0].dtype == torch.float8_e4m3fn
            assert torch.equal(recv[0].view(torch.uint8), case.rows(gather(group, bytes_)))
            assert recv[1].is_contiguous() and recv[1].dtype == torch.float32
            assert torch.equal(recv[1], case.rows(gather(group, given.contiguous())))
            assert torch.equal(recv_idx, case.row_idx())
            again = buffer.dispatch((x, given), handle=handle)[0]
            assert torch.equal(again[1], recv[1])
    bare, none = dispatch(buffer, case, (x, torch.ones(case.x.size(0), 0)))[0]
    assert torch.equal(bare.view(torch.uint8), recv[0].view(torch.uint8))
    assert none.shape == (bare.size(0), 0) and none.dtype == torch.float32
    packed = torch.randint(0, 1 << 30, (case.x.size(0), 2), dtype=torch.int32)
    recv = dispatch(buffer, case, (x, packed), num_worst_tokens=64)[0]
    want = case.rows(gather(group, packed))
    assert recv[1].dtype == torch.int32 and torch.equal(recv[1][: want.size(0)], want)
    nvfp4 = (bytes_.view(torch.int32)[:, :32], packed, torch.randn(case.x.size(0), 1))
    recv = dispatch(buffer, case, nvfp4)[0]
    for part, sent in zip(recv, nvfp4, strict=True):
        assert part.dtype == sent.dtype and torch.equal(
            part, case.rows(gather(group, sent.contiguous()))
        )


def test_fp8_rows_travel_with_scales_of_any_strides(ranks):
    ranks(fp8, 3)


def several_handles(rank, num_ranks, group):
    buffer = Buffer(group)
    cases = [Case(rank, group, 2 * num_ranks, 2, TOKENS[i:] + TOKENS[:i], seed=i) for i in range(3)]
    sent = [dispatch(buffer, case) for case in cases]
    for i in (1, 0, 2, 1):
        recv_x, handle = sent[i][0], sent[i][4]
        out, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(out, cases[i].summed(gather(group, recv_x)))
        assert torch.equal(buffer.dispatch(cases[i].x, handle=handle)[0], recv_x)


def test_handles_live_side_by_side(ranks):
    ranks(several_handles, 2)


def gradients_are_not_tracked(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 2, (4,))
    buffer = Buffer(group)
    x = case.x.float().requires_grad_()
    recv_x, *_, handle, _ = dispatch(buffer, case, x)
    out, _, _ = buffer.combine(recv_x, handle, bias=x)
    assert recv_x.dtype == out.dtype == torch.float32
    assert not recv_x.requires_grad and not out.requires_grad


def test_takes_fp32_and_tracks_no_gradients(ranks):
    ranks(gradients_are_not_tracked, 2)


def many_tokens(rank, num_ranks, group):
    case = Case(rank, group, num_ranks, 1, (3, 5000), hidden=8)
    buffer = Buffer(group)
    recv_x, recv_idx, _, counts, handle, _ = dispatch(buffer, case)
    assert torch.equal(recv_x, case.rows(case.all_x)) and counts == case.counts()
    out, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(out, case.summed(gather(group, recv_x)))


def test_more_tokens_than_a_buffer_starts_with(ranks):
    ranks(many_tokens, 2)


def test_layout_of_more_ranks_than_a_host_has():
    idx = torch.tensor([[0, 1, 16], [23, 22, -1], [15, 17, 24]])  # two experts a rank, 12 ranks
    hosts = Hosts([range(12)], rank=3)
    found = layout_of(idx, 24, hosts)
    assert found.num_tokens_per_rank.tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 1]
    assert found.num_tokens_per_rdma_rank.dtype == torch.int32
    assert found.num_tokens_per_rdma_rank.tolist() == [2, 3]
    assert layout_of(idx[:0], 24, hosts).num_tokens_per_rdma_rank.tolist() == [0, 0]


def test_routes_to_ranks_fit_the_largest_number_of_choices():
    in_rank = torch.zeros(2, 40, dtype=torch.bool)
    in_rank[0, [1, 39]] = True
    routes = routes_to_ranks(in_rank, 4)
    assert routes.shape == (2, 32)
    assert sorted(e for e in routes[0].tolist() if e >= 0) == [4, 156]
    assert (routes[1] == -1).all()


class LargePlan:
    """The part of a plan among 12 ranks that a handle asks for."""

    received_arrivals = [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 5]

    class exchange:
        num_ranks, rank, device = 12, 3, torch.device("cpu")


def test_handle_of_more_ranks_than_a_host_has():
    in_rank = torch.zeros(1, 12, dtype=torch.bool)
    handle = Handle(LargePlan(), in_rank, False, None, 10, Hosts([range(12)], rank=3))
    assert len(handle) == 10 and handle[0] is in_rank
    assert handle[-4].dtype == torch.int32
    assert handle[-4].tolist() == [1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 8]
    assert handle[4].tolist() == [3, 8] and handle[3].shape == (2, 10)
