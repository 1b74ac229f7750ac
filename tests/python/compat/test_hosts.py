# SPDX-License-Identifier: Apache-2.0
"""`Buffer` among several hosts: layouts, handles and sums."""

import pytest
import torch
from buffer_cases import Case, dispatch, gather

import weft
from domain_cases import DOMAINS, NUM_RANKS, two_domains
from weft.compat.deep_ep import Buffer, Config, EventHandle, EventOverlap
from weft.compat.deep_ep.layout import Hosts, layout_of

TOKENS = (17, 0, 5, 9)


@pytest.mark.parametrize(
    ("domains", "hosts"),
    [
        ([range(8)], [range(8)]),
        ([range(12)], [range(8), range(8, 12)]),
        (DOMAINS, DOMAINS),
        ([[5, 1], [0, 3, 4], [2]], [[0, 3, 4], [1, 5], [2]]),
        ([range(16, 32), range(16)], [range(i, i + 8) for i in range(0, 32, 8)]),
    ],
)
def test_hosts_are_domains_of_at_most_eight(domains, hosts):
    hosts = [list(one) for one in hosts]
    last = max(max(one) for one in hosts)
    found = Hosts(domains, last)
    assert found.ranks == hosts and found.num_hosts == len(hosts)
    assert found.num_ranks == last + 1 and found.are_several == (len(hosts) > 1)
    assert [rank in hosts[host] for rank, host in enumerate(found.host_of)] == [True] * (last + 1)
    assert last in hosts[found.here]


def test_layout_counts_a_token_once_for_a_host():
    idx = torch.tensor([[0, 1, 5], [2, 2, -1], [3, 6, 4], [-1, -1, 6]])  # one expert a rank
    found = layout_of(idx, 6, Hosts([[5, 1], [0, 3, 4], [2]], rank=0))
    assert found.num_tokens_per_rdma_rank.dtype == torch.int32
    assert found.num_tokens_per_rdma_rank.tolist() == [2, 1, 1]
    assert found.num_tokens_per_rank.tolist() == [1, 1, 1, 1, 1, 1]


def rows_of_hosts(case):
    """Rows that this rank gets from each rank, and from each host."""
    by_rank = [len(case.tokens_of(source, case.rank)) for source in range(case.num_ranks)]
    return by_rank, [sum(by_rank[rank] for rank in domain) for domain in DOMAINS]


def prefix(counts):
    return torch.tensor(counts).cumsum(0).tolist()


def check_handle(handle, case, num_sms, with_topk):
    """All ten items, their types and shapes."""
    (in_rank, rdma, gbl, recv_rdma, recv_rdma_sum, recv_gbl, recv_gbl_sum, meta, host_head, nvl) = (
        handle
    )
    T, R, S, C = case.x.size(0), case.num_ranks, len(DOMAINS), num_sms // 2
    arrivals = case.arrivals(case.rank)
    by_rank, by_host = rows_of_hosts(case)
    expected = (
        (in_rank, torch.bool, (T, R)),
        (rdma, torch.int32, (S, C)),
        (gbl, torch.int32, (R, C)),
        (recv_rdma, torch.int32, (S, C)),
        (recv_rdma_sum, torch.int32, (S,)),
        (recv_gbl, torch.int32, (R, C)),
        (recv_gbl_sum, torch.int32, (R,)),
        (meta, torch.uint8, (len(arrivals), 8)),
        (host_head, torch.int32, (T, S)),
        (nvl, torch.int32, (len(arrivals), 8)),
    )
    assert len(handle) == len(expected) == 10
    for item, dtype, shape in expected:
        assert item.dtype == dtype and tuple(item.shape) == shape
    to_rank = [case.tokens_of(case.rank, rank) for rank in range(R)]
    to_host = [sorted({t for rank in domain for t in to_rank[rank]}) for domain in DOMAINS]
    assert [in_rank[:, r].nonzero().flatten().tolist() for r in range(R)] == to_rank
    assert rdma.tolist() == [[len(tokens)] * C for tokens in to_host]
    assert gbl.tolist() == [[len(tokens)] * C for tokens in to_rank]
    assert recv_rdma.tolist() == [[count] * C for count in by_host]
    assert recv_rdma_sum.tolist() == prefix(by_host)
    assert recv_gbl.tolist() == [[count] * C for count in by_rank]
    assert recv_gbl_sum.tolist() == prefix(by_rank) and torch.equal(handle[-4], recv_gbl_sum)
    for host, tokens in enumerate(to_host):
        places = [tokens.index(t) if t in tokens else -1 for t in range(T)]
        assert host_head[:, host].tolist() == places
    assert (nvl == -1).all()
    here = next(domain for domain in DOMAINS if case.rank in domain)
    for (source, token), (host, bits) in zip(
        arrivals, meta.view(torch.int32).tolist(), strict=True
    ):
        goes_to = {case.owner(e) for e in case.all_idx[source][token].tolist()}
        near = [r for r in here if r in goes_to] if with_topk else [case.rank]
        assert source in DOMAINS[host] and bits == sum(1 << here.index(r) for r in near)


def round_trip(rank, num_ranks, group):
    with two_domains() as hosts:
        case = Case(rank, hosts, 2 * num_ranks, 3, TOKENS)
        buffer = Buffer(hosts, num_nvl_bytes=1 << 20, num_rdma_bytes=1 << 20)
        runtime = buffer.runtime
        assert runtime.get_num_rdma_ranks() == 2 and runtime.get_rdma_rank() == rank // 2
        assert runtime.is_internode_available() and buffer.num_rdma_bytes == 1 << 20
        _, per_rdma, *_ = buffer.get_dispatch_layout(case.idx, case.num_experts)
        tokens = [{t for r in domain for t in case.tokens_of(rank, r)} for domain in DOMAINS]
        assert per_rdma.dtype == torch.int32 and per_rdma.tolist() == [len(one) for one in tokens]

        recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(
            buffer, case, expert_alignment=4
        )
        assert torch.equal(recv_x, case.rows(case.all_x)) and torch.equal(recv_idx, case.row_idx())
        assert torch.equal(recv_weights, case.row_weights()) and counts == case.counts(4)
        check_handle(handle, case, Buffer.num_sms, with_topk=True)

        event = EventOverlap(EventHandle())
        again, *nothing, event = buffer.dispatch(
            -case.x, handle=handle, previous_event=event, async_finish=True
        )
        event.current_stream_wait()
        assert torch.equal(again, -recv_x) and nothing == [None] * 4

        gen = torch.Generator().manual_seed(rank)
        rows = torch.randn(recv_x.shape, generator=gen).to(torch.bfloat16)
        all_rows = gather(hosts, rows)
        out, weights, event = buffer.combine(
            rows,
            handle,
            topk_weights=recv_weights,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        assert torch.equal(out, case.summed(all_rows, domains=DOMAINS))
        assert torch.equal(weights, torch.where(case.idx >= 0, case.weights, torch.zeros(())))
        biases = tuple(torch.randn(case.x.shape, generator=gen).to(torch.bfloat16) for _ in "ab")
        out, _, _ = buffer.combine(rows, handle, bias=biases)
        assert torch.equal(out, case.summed(all_rows, biases, domains=DOMAINS))

        bound = max(TOKENS) * num_ranks
        worst = dispatch(buffer, case, num_worst_tokens=bound)
        used = recv_x.size(0)
        assert worst[0].size(0) == bound and torch.equal(worst[0][:used], recv_x)
        assert worst[3] == [] and (worst[1][used:] == -1).all()
        meta = worst[4].recv_src_meta.view(torch.int32)
        assert meta.shape == (bound, 2) and (meta[used:, 0] == -1).all()

        wrong = torch.zeros(3, dtype=torch.int32)
        with pytest.raises(AssertionError, match=r"num_tokens_per_rdma_rank has shape \[3\]"):
            layout = buffer.get_dispatch_layout(case.idx, case.num_experts)
            buffer.dispatch(case.x, None, layout[0], wrong, layout[3], layout[2])


def without_topk(rank, num_ranks, group):
    with two_domains() as hosts:
        case = Case(rank, hosts, 2 * num_ranks, 3, TOKENS, seed=3)
        buffer = Buffer(hosts)
        recv_x, _, _, counts, handle, _ = dispatch(
            buffer, case, with_topk=False, config=Config(12, 8, 256)
        )
        assert torch.equal(recv_x, case.rows(case.all_x)) and counts == case.counts()
        check_handle(handle, case, 12, with_topk=False)
        out, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(out, case.summed(gather(hosts, recv_x), domains=DOMAINS))


def without_layout(rank, num_ranks, group):
    """A dispatch that made no layout has the same handle."""
    with two_domains() as hosts:
        case = Case(rank, hosts, 2 * num_ranks, 3, TOKENS)
        handle = Buffer(hosts).dispatch_by_topk(case.x, case.idx, case.weights, case.num_experts)[4]
        check_handle(handle, case, Buffer.num_sms, with_topk=True)


def rank_without_rows(rank, num_ranks, group):
    with two_domains() as hosts:
        case = Case(rank, hosts, 2 * num_ranks, 2, (7, 3, 4, 5))
        last = case.num_experts - 1
        for idx in (case.idx, *case.all_idx):
            idx[idx >= last - 1] = -1
        buffer = Buffer(hosts)
        recv_x, _, _, counts, handle, _ = dispatch(buffer, case)
        assert torch.equal(recv_x, case.rows(case.all_x)) and counts == case.counts()
        assert (recv_x.size(0) == 0) == (rank == num_ranks - 1)
        check_handle(handle, case, Buffer.num_sms, with_topk=True)
        out, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(out, case.summed(gather(hosts, recv_x), domains=DOMAINS))


def low_latency(rank, num_ranks, group):
    with two_domains() as hosts:
        case = Case(rank, hosts, 2 * num_ranks, 2, (5, 3), hidden=128, distinct=True)
        buffer = Buffer(hosts, low_latency_mode=True)
        (recv_x, scales), count, handle, _, hook = buffer.low_latency_dispatch(
            case.x, case.idx, 8, case.num_experts, return_recv_hook=True
        )
        hook()
        assert recv_x.dtype == torch.float8_e4m3fn and count.tolist() == case.counts()
        rows = torch.ones(recv_x.shape, dtype=torch.bfloat16)
        out, _, _ = buffer.low_latency_combine(
            rows, case.idx, torch.ones_like(case.weights), handle
        )
        assert torch.equal(out[:, 0].float(), (case.idx >= 0).sum(1).float())


def one_domain_after_all(rank, num_ranks, group):
    """Without the variable, these ranks are on one host again."""
    buffer = Buffer(group)
    assert buffer.runtime.get_num_rdma_ranks() == 1 and len(weft.Group.of(group).domains) == 1
    case = Case(rank, group, 2 * num_ranks, 3, TOKENS)
    assert buffer.get_dispatch_layout(case.idx, case.num_experts)[1] is None
    assert len(dispatch(buffer, case)[4]) == 6


@pytest.mark.parametrize(
    "body",
    [
        round_trip,
        without_topk,
        without_layout,
        rank_without_rows,
        low_latency,
        one_domain_after_all,
    ],
)
def test_two_hosts_of_two(ranks, body):
    ranks(body, NUM_RANKS)
