# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer.dispatch and combine, and what the buffer says of itself."""

import inspect
import warnings

import pytest
import torch
from hybrid_ep_oracle import Case, gather, same_bits

import weft
from weft.compat.deep_ep.hybrid_ep import HybridEPBuffer


def want_rows(case, values):
    rows = [values[s][t] for s, t in case.arrivals(case.rank)]
    return torch.stack(rows) if rows else values[0][:0]


def want_probs(case):
    """[N, experts of all ranks]: one domain holds them all."""
    mine = slice(case.rank * case.local, (case.rank + 1) * case.local)
    arrivals = case.arrivals(case.rank)
    probs = torch.zeros(len(arrivals), case.experts)
    for row, (source, t) in enumerate(arrivals):
        probs[row, mine] = case.all_probs[source][t, mine]
    return probs


def plain(rank, num_ranks, group, tokens, dtype, with_probs):
    case = Case(rank, num_ranks, group, tokens, hidden=128, dtype=dtype).gather()
    buffer = HybridEPBuffer(group, 128, 64, case.local)
    rows, probs, scales, handle = buffer.dispatch(
        case.hidden,
        case.scales,
        probs=case.probs if with_probs else None,
        routing_map=case.map,
    )
    assert same_bits(rows, want_rows(case, case.all_hidden))
    if with_probs:
        assert same_bits(probs, want_probs(case))
    else:
        assert probs is None
    if dtype == torch.uint8:
        assert same_bits(scales, want_rows(case, case.all_scales))
    else:
        assert scales is None
    assert len(handle) == 7
    _, _, _, count, local_map, num_tokens, _ = handle
    assert count.tolist() == [rows.size(0)] and num_tokens == case.hidden.size(0)
    mine = slice(rank * case.local, (rank + 1) * case.local)
    assert same_bits(local_map, want_rows(case, [m[:, mine] for m in case.maps]))
    again, again_probs, again_scales, same = buffer.dispatch(
        case.hidden, case.scales, probs=case.probs, handle=handle, num_of_experts=case.experts
    )
    assert same is handle and same_bits(again, rows) and same_bits(again_probs, want_probs(case))
    assert (again_scales is None) == (scales is None)
    back = rows.to(torch.bfloat16)
    if with_probs:
        probs[:, : rank * case.local] = 7.0  # other ranks' columns are not read
    out, dense = buffer.combine(back, probs, handle)
    if with_probs:
        assert same_bits(dense, case.probs)
    else:
        assert dense is None
    total = torch.zeros(case.hidden.size(0), 128)
    for peer, values in enumerate(gather(group, back)):
        for row, (source, t) in enumerate(case.arrivals(peer)):
            if source == rank:
                total[t] += values[row].float()
    assert same_bits(out, total.to(torch.bfloat16))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("with_probs", [True, False])
def test_one_row_for_each_token_and_rank(ranks, num_ranks, dtype, with_probs):
    ranks(plain, num_ranks, (9, 0, 14), dtype, with_probs)


def test_nobody_has_tokens(ranks):
    ranks(plain, 2, (0,), torch.bfloat16, True)


def known_count(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (8, 3)).gather()
    buffer = HybridEPBuffer(group, 16, 64, case.local)
    count = len(case.arrivals(rank))
    rows, probs, _, handle = buffer.dispatch(
        case.hidden, probs=case.probs, routing_map=case.map, num_dispatched_tokens=count + 5
    )
    assert rows.size(0) == count + 5 and same_bits(rows[:count], want_rows(case, case.all_hidden))
    assert same_bits(probs[:count], want_probs(case)) and probs[count:].eq(0).all()
    assert handle[3].tolist() == [count] and not handle[4][count:].any()


def test_a_count_that_the_caller_knows(ranks):
    ranks(known_count, 2)


def slots(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (5, 8)).gather()
    buffer = HybridEPBuffer(group, 16, 64, case.local)
    given = {"hidden": case.hidden, "routing_map": case.map, "probs": case.probs}
    budget = max(case.slots(each, 1)[2] for each in range(num_ranks))
    for num_of_tokens_per_rank in (8, 600):  # the latter is more than the buffer's capacity
        more = {"num_of_tokens_per_rank": num_of_tokens_per_rank}
        rows, probs, _, handle = buffer.dispatch(**given, **more)
        assert same_bits(rows, want_rows(case, case.all_hidden))
        assert same_bits(probs, want_probs(case))
        again, *_ = buffer.dispatch(case.hidden, handle=handle, **more)
        assert same_bits(again, rows)
        want, *_ = case.permuted(1)
        for fixed in ({}, {"non_blocking": True, "num_permuted_tokens": budget}):
            rows, *_, handle = buffer.dispatch_with_permute(**given, **fixed, **more)
            assert same_bits(rows[: len(want)], want)
            again, *_ = buffer.dispatch_with_permute(hidden=case.hidden, handle=handle, **more)
            assert same_bits(again[: len(want)], want)
    for call in (buffer.dispatch, buffer.dispatch_with_permute):
        with pytest.raises(AssertionError, match="num_of_tokens_per_rank = 7 .*at least 8"):
            call(**given, num_of_tokens_per_rank=7)
        assert same_bits(buffer.dispatch(**given)[0], want_rows(case, case.all_hidden))


def test_ranks_share_a_number_of_slots(ranks):
    ranks(slots, 2)


def indices(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (5, 7)).gather()
    buffer = HybridEPBuffer(group, 16, 64, case.local)
    width = int(case.map.sum(1).max())
    idx = torch.full((case.map.size(0), width), -1)
    for t in range(case.map.size(0)):
        chosen = case.map[t].nonzero().flatten()
        idx[t, -chosen.numel() or width :] = chosen.flip(0)
    weights = case.probs.gather(1, idx.clamp(min=0))
    rows, probs, _, handle = buffer.dispatch(
        hidden=case.hidden, topk_idx=idx, topk_weights=weights, num_of_experts=case.experts
    )
    assert same_bits(rows, want_rows(case, case.all_hidden))
    assert same_bits(probs, want_probs(case))
    _, again, _, _ = buffer.dispatch(
        hidden=case.hidden, topk_idx=idx, topk_weights=weights, handle=handle
    )
    assert same_bits(again, probs)
    with pytest.raises(weft.InvalidArgument, match=r"expected a tensor \[\d+, 8\]"):
        buffer.combine(rows, probs[:, :3], handle)
    with pytest.raises(weft.InvalidArgument, match="expected one of dispatch"):
        buffer.combine(rows)


def test_topk_indices(ranks):
    ranks(indices, 2)


def domains(rank, num_ranks, group):
    import os

    with pytest.warns(UserWarning, match="replaces the 4 ranks"):
        os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "2"
        try:
            buffer = HybridEPBuffer(group, 16, 64, 4)
        finally:
            del os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"]
    assert (buffer.num_of_nodes, buffer.node_rank, buffer.local_rank) == (2, rank // 2, rank % 2)
    case = Case(rank, num_ranks, group, (6, 9)).gather()
    rows, probs, _, handle = buffer.dispatch(case.hidden, probs=case.probs, routing_map=case.map)
    first = rank // 2 * 8
    assert same_bits(probs, want_probs(case)[:, first : first + 8])
    assert same_bits(buffer.combine(rows, probs, handle)[1], case.probs)
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "3"
    try:
        with pytest.raises(weft.InvalidArgument, match="divisor of the 4 ranks"):
            HybridEPBuffer(group, 16, 64, 4)
    finally:
        del os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"]


def test_domains_by_environment(ranks):
    ranks(domains, 4)


def itself(rank, num_ranks, group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = HybridEPBuffer(group, 16, 600, 4, False, 24, 24)
    assert buffer.group is group and (buffer.rank, buffer.group_size) == (rank, num_ranks)
    assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == num_ranks
    assert (buffer.local_rank, buffer.node_rank, buffer.num_of_nodes) == (rank, 0, 1)
    assert buffer.empty_jit_cache() is None
    config = buffer.update_template_config(num_of_tokens_per_rank=1000, pad_multiple=0, extra=3)
    assert config.max_num_of_tokens_per_rank == 1008 and config.extra == 3
    assert config.pad_multiple == 0
    config = buffer.update_template_config(32, 100, 8, 16, True, True)
    assert config.max_num_of_tokens_per_rank == 1008
    assert (config.hidden_dim, config.num_of_experts_per_rank) == (32, 8)
    assert config.pad_multiple == 16 and config.use_fp8 and config.fuse_permute_dispatch
    with pytest.warns(DeprecationWarning, match="use_mnnvl"):
        HybridEPBuffer(group, 16, 64, 4, use_mnnvl=True)
    case = Case(rank, num_ranks, group, (4,)).gather()
    given = {"hidden": case.hidden, "routing_map": case.map}
    with pytest.warns(DeprecationWarning, match="use_host_meta"):
        out = buffer.dispatch_with_permute(use_host_meta=False, num_permuted_tokens=99, **given)
    assert out[0].size(0) == 99
    with pytest.warns(DeprecationWarning, match="num_dispatched_tokens"):
        out = buffer.dispatch_with_permute(num_dispatched_tokens=3, **given)
    with pytest.warns(DeprecationWarning, match="num_dispatched_tokens"):
        buffer.combine_with_unpermute(hidden=out[0], handle=out[4], num_dispatched_tokens=3)
    given = {"hidden": out[0], "handle": out[4]}
    sums = [buffer.combine_with_unpermute(**given, non_blocking=one)[0] for one in (False, True)]
    assert torch.equal(*sums)


def test_attributes_settings_and_deprecated_arguments(ranks):
    ranks(itself, 2)


def test_signatures_are_keyword_only_where_callers_look():
    dispatch = inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters
    assert "fuse_permute_dispatch" in dispatch and "non_blocking" in dispatch
    combine = inspect.signature(HybridEPBuffer.combine_with_unpermute).parameters
    assert "fuse_unpermute_combine" in combine
    for parameters in (dispatch, combine):
        kinds = {p.kind for name, p in parameters.items() if name != "self"}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def many_choices(rank, num_ranks, group):
    """More routes of a token than the exchange began with, then more tokens."""
    buffer = HybridEPBuffer(group, 16, 64, 12)
    for tokens, density in (((4,), 0.1), ((5, 3), 0.9), ((700, 20), 0.05)):
        case = Case(rank, num_ranks, group, tokens, local=12, density=density).gather()
        rows, probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=case.hidden, routing_map=case.map, probs=case.probs
        )
        assert same_bits(rows, case.permuted()[0])
        _, dense = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        assert same_bits(dense, case.probs)


def test_grows_with_its_input(ranks):
    ranks(many_choices, 2)
