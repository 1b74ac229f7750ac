# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer.dispatch_with_permute and combine_with_unpermute against loops, bit for bit."""

import pytest
import torch
from hybrid_ep_oracle import Case, gather, same_bits

import weft
from weft.compat.deep_ep.hybrid_ep import HybridEPBuffer

TOKENS = {"uneven": (13, 0, 6), "even": (9,), "nobody": (0,)}


def buffer_of(group, case, **options):
    return HybridEPBuffer(
        group=group,
        hidden_dim=case.hidden.size(1),
        max_num_of_tokens_per_rank=case.hidden.size(0),
        num_local_experts=case.local,
        **options,
    )


def round_trip(rank, num_ranks, group, tokens, pad, dtype, hidden, with_probs, fused):
    case = Case(rank, num_ranks, group, TOKENS[tokens], hidden=hidden, dtype=dtype).gather()
    buffer = buffer_of(group, case)
    want_rows, want_probs, want_scales, counts, _ = case.permuted(pad or 1)
    rows, probs, scales, tokens_per_expert, handle = buffer.dispatch_with_permute(
        hidden=case.hidden,
        routing_map=case.map,
        probs=case.probs if with_probs else None,
        scaling_factor=case.scales,
        num_of_experts_per_rank=case.local,
        pad_multiple=pad,
        fuse_permute_dispatch=fused,
    )
    assert same_bits(rows, want_rows)
    assert tokens_per_expert.dtype == torch.int64 and tokens_per_expert.tolist() == counts
    assert handle[-1].tolist() == [0] and handle[-1].dtype == torch.int32
    if with_probs:
        assert probs.dim() == 1 and same_bits(probs, want_probs)
    else:
        assert probs is None
    if dtype == torch.uint8:
        assert same_bits(scales, want_scales)
        rows = rows.to(torch.bfloat16)
    else:
        assert scales is None
    out, dense = buffer.combine_with_unpermute(
        hidden=rows,
        probs=probs,
        handle=handle,
        pad_multiple=pad,
        fuse_unpermute_combine=fused,
    )
    want, want_dense = case.unpermuted(rows, probs, pad or 1)
    assert same_bits(out, want)
    if with_probs:
        assert same_bits(dense, want_dense) and same_bits(dense, case.probs)
    else:
        assert dense is None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("pad", [None, 8])
def test_round_trip(ranks, num_ranks, tokens, pad):
    ranks(round_trip, num_ranks, tokens, pad, torch.bfloat16, 16, True, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_dtypes_fused_or_not_with_or_without_probs(ranks, dtype, with_probs, fused):
    ranks(round_trip, 2, "uneven", 4, dtype, 24, with_probs, fused)


@pytest.mark.parametrize("pad", [0, 16])
def test_fp8_rows_travel_with_scales_and_padding_scales_are_zero(ranks, pad):
    ranks(round_trip, 3, "uneven", pad, torch.uint8, 256, True, False)


def float8(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (7, 3), hidden=128, dtype=torch.uint8).gather()
    buffer = buffer_of(group, case, use_fp8=True)
    rows, _, scales, _, _ = buffer.dispatch_with_permute(
        hidden=case.hidden.view(torch.float8_e4m3fn),
        routing_map=case.map,
        probs=case.probs,
        scaling_factor=case.scales,
        use_fp8=True,
    )
    want, _, want_scales, _, _ = case.permuted()
    assert rows.dtype == torch.float8_e4m3fn
    assert same_bits(rows.view(torch.uint8), want) and same_bits(scales, want_scales)


def test_float8_dtype_comes_back_as_it_is(ranks):
    ranks(float8, 2)


def nothing_here(rank, num_ranks, group):
    """The last rank's experts get nothing; it still has tokens of its own."""
    case = Case(rank, num_ranks, group, (6, 4), dtype=torch.float32)
    case.map[:, -case.local :] = False
    case.gather()
    buffer = buffer_of(group, case)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=case.hidden, routing_map=case.map, probs=case.probs, pad_multiple=4
    )
    if rank == num_ranks - 1:
        assert rows.shape == (0, 16) and probs.shape == (0,) and counts.tolist() == [0] * 4
    out, dense = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
    want, want_dense = case.unpermuted(rows, probs, 4)
    assert same_bits(out, want) and same_bits(dense, want_dense)


def test_a_rank_that_receives_nothing(ranks):
    ranks(nothing_here, 3)


def by_indices(rank, num_ranks, group):
    """topk_idx with -1 anywhere and the same expert twice, whose weights add up, gives what its map
    gives."""
    gen = torch.Generator().manual_seed(rank)
    case = Case(rank, num_ranks, group, (8, 5, 0), dtype=torch.float32)
    num_tokens = case.hidden.size(0)
    idx = torch.randint(-1, case.experts, (num_tokens, 3), generator=gen)
    idx[: num_tokens // 2, 2] = -1
    idx[:1] = rank  # three times
    weights = torch.rand(num_tokens, 3, generator=gen)
    case.map.zero_()
    case.probs.zero_()
    for t in range(num_tokens):
        for k in range(3):
            if idx[t, k] >= 0:
                case.map[t, idx[t, k]] = True
                case.probs[t, idx[t, k]] += weights[t, k]
    case.gather()
    buffer = buffer_of(group, case)
    want_rows, want_probs, _, counts, _ = case.permuted(4)
    for given in ({"num_of_experts": case.experts}, {"num_of_experts_per_rank": 4}, {}):
        for indices in (idx, idx.int()):
            rows, probs, _, tokens_per_expert, handle = buffer.dispatch_with_permute(
                hidden=case.hidden,
                topk_idx=indices,
                topk_weights=weights,
                pad_multiple=4,
                **given,
            )
            assert same_bits(rows, want_rows) and same_bits(probs, want_probs)
            assert tokens_per_expert.tolist() == counts
    rows, probs, _, _, _ = buffer.dispatch_with_permute(
        hidden=case.hidden, topk_idx=idx, topk_weights=weights, handle=handle
    )
    assert same_bits(rows, want_rows) and same_bits(probs, want_probs)
    out, dense = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
    assert same_bits(dense, case.probs)
    assert same_bits(out, case.unpermuted(rows, probs, 4)[0])


def test_topk_indices(ranks):
    ranks(by_indices, 3)


def not_contiguous(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (6, 9), dtype=torch.float32).gather()
    buffer = buffer_of(group, case)

    def strided(tensor):
        return tensor.t().contiguous().t()

    rows, probs, _, _, handle = buffer.dispatch_with_permute(
        hidden=strided(case.hidden), routing_map=strided(case.map), probs=strided(case.probs)
    )
    want_rows, want_probs, _, _, _ = case.permuted()
    assert same_bits(rows, want_rows) and same_bits(probs, want_probs)
    every_other = torch.stack([probs, probs], dim=1)[:, 0]
    out, dense = buffer.combine_with_unpermute(
        hidden=strided(rows), probs=every_other, handle=handle
    )
    want, _ = case.unpermuted(rows, probs)
    assert same_bits(out, want) and same_bits(dense, case.probs)


def test_inputs_need_not_be_contiguous(ranks):
    ranks(not_contiguous, 2)


def gradients(rank, num_ranks, group):
    """Calls of the autograd functions: combine gradients, dispatch gradients with the handle."""
    case = Case(rank, num_ranks, group, (7, 2, 11)).gather()
    buffer = buffer_of(group, case)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=case.hidden, routing_map=case.map, probs=case.probs, pad_multiple=8
    )
    gen = torch.Generator().manual_seed(rank)
    grad_rows = torch.randn(rows.shape, generator=gen).bfloat16()
    grad_probs = torch.randn(probs.shape, generator=gen)
    grad_x, grad_dense = buffer.combine_with_unpermute(
        hidden=grad_rows, probs=grad_probs, handle=handle, pad_multiple=8
    )
    want_x, want_dense = case.unpermuted(grad_rows, grad_probs, 8)
    assert same_bits(grad_x, want_x) and same_bits(grad_dense, want_dense)
    assert grad_dense[~case.map].eq(0).all()
    grad = torch.randn(case.hidden.shape, generator=gen).bfloat16()
    case.all_hidden = gather(group, grad)
    want, _, _, _, _ = case.permuted(8)
    for size in (int(counts.sum()), counts.sum(), None):
        back, no_probs, no_scales, no_counts, same = buffer.dispatch_with_permute(
            hidden=grad,
            scaling_factor=None,
            handle=handle,
            pad_multiple=8,
            num_permuted_tokens=size,
        )
        assert same_bits(back, want) and same is handle
        assert no_probs is None and no_scales is None and no_counts is None


def test_backward_passes_reuse_the_handle(ranks):
    ranks(gradients, 3)


def without_handle(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (6, 9)).gather()
    buffer = buffer_of(group, case)
    rows, probs, _, _, handle = buffer.dispatch_with_permute(
        hidden=case.hidden, routing_map=case.map, probs=case.probs
    )
    given = {} if rank == num_ranks - 1 else {"handle": handle}
    with pytest.raises(weft.InvalidArgument, match="handle is a NoneType .expected one of dispat"):
        buffer.combine_with_unpermute(hidden=rows, **given)
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    assert same_bits(out, case.unpermuted(rows, probs)[0])


def test_a_handle_that_one_rank_leaves_out(ranks):
    ranks(without_handle, 2)
