# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer on several nodes, and what the variable about NVLink domains does to it."""

import os

import pytest
import torch
from hybrid_ep_oracle import Case, gather, rounded, same_bits

import weft
from domain_cases import DOMAINS, NUM_RANKS, two_domains
from weft.compat.deep_ep import ElasticBuffer
from weft.compat.deep_ep.hybrid_ep import HybridEPBuffer
from weft.compat.deep_ep.layout import ENVIRONMENT

TOKENS = (9, 0, 14, 6)


def check_nodes(buffer, rank, per_node):
    assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == per_node
    assert buffer.num_of_nodes == NUM_RANKS // per_node
    assert (buffer.local_rank, buffer.node_rank) == (rank % per_node, rank // per_node)
    config = buffer.update_template_config()
    assert config.num_of_ranks_per_node == per_node
    assert config.num_of_nodes == NUM_RANKS // per_node


def check_map_of_nodes(handle, case, per_node):
    """attn_to_rdma_map: which tokens go to each other node."""
    experts = per_node * case.local
    nodes = [
        case.map[:, first : first + experts].any(1) for first in range(0, case.experts, experts)
    ]
    others = nodes[: case.rank // per_node] + nodes[case.rank // per_node + 1 :]
    assert handle[2].dtype == torch.bool
    assert handle[2].shape == (case.map.size(0), NUM_RANKS // per_node - 1)
    for column, is_going in zip(handle[2].unbind(1), others, strict=True):
        assert torch.equal(column, is_going)


def check_plain(buffer, case, per_node):
    """probs are as wide as the experts of a node, and this rank's columns are by its place."""
    local, place = case.local, case.rank % per_node
    arrivals = case.arrivals(case.rank)
    want = torch.zeros(len(arrivals), per_node * local)
    mine = slice(case.rank * local, (case.rank + 1) * local)
    for row, (source, t) in enumerate(arrivals):
        want[row, place * local : (place + 1) * local] = case.all_probs[source][t, mine]
    rows, probs, _, handle = buffer.dispatch(case.hidden, probs=case.probs, routing_map=case.map)
    want_rows = [case.all_hidden[source][t] for source, t in arrivals]
    assert same_bits(rows, torch.stack(want_rows) if want_rows else case.hidden[:0])
    assert same_bits(probs, want)
    check_map_of_nodes(handle, case, per_node)
    again, again_probs, _, _ = buffer.dispatch(-case.hidden, probs=case.probs, handle=handle)
    assert same_bits(again, -rows) and same_bits(again_probs, want)
    out, dense = buffer.combine(rows, probs, handle)
    assert same_bits(dense, case.probs)
    assert same_bits(out, summed(case, gather(case.group, rows)))


def summed(case, all_rows):
    """Sums of the plain rows: of the ranks of a domain, rounded, then of the domains."""
    parts = [[[None] * case.map.size(0) for _ in domain] for domain in DOMAINS]
    for d, domain in enumerate(DOMAINS):
        for place, rank in enumerate(domain):
            for row, (source, t) in enumerate(case.arrivals(rank)):
                if source == case.rank:
                    parts[d][place][t] = all_rows[rank][row]
    out = torch.zeros_like(case.hidden)
    for t in range(out.size(0)):
        sums = [rounded([part[t] for part in domain], out.dtype) for domain in parts]
        total = rounded(sums, out.dtype)
        if total is not None:
            out[t] = total
    return out


def check_permuted(buffer, case, per_node):
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=case.hidden, routing_map=case.map, probs=case.probs, pad_multiple=4
    )
    want, want_probs, _, blocks, _ = case.permuted(4)
    assert same_bits(rows, want) and same_bits(probs, want_probs) and counts.tolist() == blocks
    check_map_of_nodes(handle, case, per_node)
    gen = torch.Generator().manual_seed(case.rank)
    back = torch.randn(rows.shape, generator=gen).to(torch.bfloat16)
    out, dense = buffer.combine_with_unpermute(hidden=back, probs=probs, handle=handle)
    want, want_dense = case.unpermuted(back, probs, 4, domains=DOMAINS)
    assert same_bits(out, want) and same_bits(dense, want_dense)
    again = buffer.dispatch_with_permute(hidden=-case.hidden, handle=handle, pad_multiple=4)
    assert same_bits(again[0], -rows + 0.0)


def check_budget(buffer, case):
    """Drops and the flag, as on one node."""
    budget = 16
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=case.hidden,
        routing_map=case.map,
        probs=case.probs,
        pad_multiple=4,
        num_permuted_tokens=budget,
        non_blocking=True,
    )
    want, _, _, blocks, is_over = case.permuted(4, budget)
    used = sum(blocks)
    assert rows.size(0) == budget and same_bits(rows[:used], want[:used])
    assert counts.tolist() == blocks and handle[-1].tolist() == [int(is_over)]
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    budgets = [budget] * case.num_ranks
    assert same_bits(out, case.unpermuted(rows, None, 4, budgets, domains=DOMAINS)[0])


def two_nodes(rank, num_ranks, group):
    with two_domains() as nodes:
        case = Case(rank, num_ranks, nodes, TOKENS).gather()
        buffer = HybridEPBuffer(nodes, 16, 64, case.local)
        check_nodes(buffer, rank, 2)
        check_plain(buffer, case, 2)
        check_permuted(buffer, case, 2)
        check_budget(buffer, case)


def nodes_by_variable(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, TOKENS).gather()
    try:
        for wrong in ("3", "0", "two", "-2"):
            os.environ[ENVIRONMENT] = wrong
            with pytest.raises(AssertionError, match=f"{ENVIRONMENT} = '{wrong}'"):
                HybridEPBuffer(group, 16, 64, case.local)
        for size in (1, 2):
            os.environ[ENVIRONMENT] = str(size)
            with pytest.warns(UserWarning, match=f"replaces the {num_ranks} ranks"):
                buffer = HybridEPBuffer(group, 16, 64, case.local)
            check_nodes(buffer, rank, size)
            rows, probs, _, handle = buffer.dispatch(
                case.hidden, probs=case.probs, routing_map=case.map
            )
            assert probs.shape == (rows.size(0), size * case.local)
            check_map_of_nodes(handle, case, size)
            assert same_bits(buffer.combine(rows, probs, handle)[1], case.probs)
        os.environ[ENVIRONMENT] = ""  # as if it were not set
        check_nodes(HybridEPBuffer(group, 16, 64, case.local), rank, num_ranks)
    finally:
        del os.environ[ENVIRONMENT]


def elastic(rank, num_ranks, group):
    with two_domains() as nodes:
        for hybrid, scaleup in ((True, 2), (False, 4)):
            buffer = ElasticBuffer(
                nodes, num_max_tokens_per_rank=16, hidden=16, allow_hybrid_mode=hybrid
            )
            assert buffer.get_physical_domain_size() == (2, 2)
            assert buffer.get_logical_domain_size() == (num_ranks // scaleup, scaleup)
            assert buffer.scaleout_rank_idx == rank // scaleup
            assert buffer.scaleup_rank_idx == rank % scaleup
        gen = torch.Generator().manual_seed(rank)
        x = torch.randint(-4, 5, (TOKENS[rank], 16), generator=gen).to(torch.bfloat16)
        idx = torch.rand(TOKENS[rank], 8, generator=gen).topk(3).indices
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=8)
        out, _, _ = buffer.combine(rows, handle)
        ranks_met = torch.tensor([len(set(row)) for row in (idx // 2).tolist()]).view(-1, 1)
        assert torch.equal(out, x * ranks_met)  # whole numbers: the same in any order
        with pytest.raises(weft.InvalidArgument):
            buffer.dispatch(x.float()[:, :3], idx, num_experts=8)


@pytest.mark.parametrize("body", [two_nodes, nodes_by_variable, elastic])
def test_several_nodes(ranks, body):
    ranks(body, NUM_RANKS)
