# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer.combine against loops, bit for bit, and both calls as a backward pass uses them."""

import pytest
import torch
from elastic_oracle import Case
from hybrid_ep_oracle import gather, same_bits

import weft
from weft.compat.deep_ep.elastic import ElasticBuffer
from weft.compat.deep_ep.utils import EventOverlap


def random_like(rows, rank, seed=0):
    gen = torch.Generator().manual_seed(50 + 10 * seed + rank)
    return torch.randn(rows.shape, generator=gen).to(rows.dtype)


def combine(rank, num_ranks, group, do_expand, num_bias, dtype, do_cpu_sync, multiple=True):
    case = Case(rank, num_ranks, group, (9, 0, 13), dtype=dtype).gather()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=case.most, allow_multiple_reduction=multiple
    )
    alignment = 4
    rows, _, weights, handle, _ = buffer.dispatch(
        case.x,
        case.idx,
        case.weights,
        num_experts=case.experts,
        expert_alignment=alignment,
        do_expand=do_expand,
        do_cpu_sync=do_cpu_sync,
    )
    y = random_like(rows, rank)
    used = int(handle.psum_num_recv_tokens_per_expert[-1]) if do_expand else len(case.arrivals())
    y[used:] = float("nan")  # what is past the rows in use is not read
    biases = tuple(random_like(case.x, rank, seed) for seed in range(1, num_bias + 1))
    bias = {0: None, 1: biases[0] if biases else None, 2: biases}[num_bias]
    out, back, event = buffer.combine(y, handle, weights, bias)
    assert isinstance(event, EventOverlap)
    want = case.combined(
        y,
        alignment if do_expand else None,
        biases,
        round_per_rank=multiple,
    )
    assert out.dtype == dtype and same_bits(out, want)
    assert same_bits(back, torch.where(case.idx >= 0, case.weights, 0.0))
    out, back, _ = buffer.combine(y.t().contiguous().t(), handle=handle, bias=bias)
    assert same_bits(out, want) and back is None


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("do_expand", [True, False])
@pytest.mark.parametrize("num_bias", [0, 1, 2])
def test_combine_with_weights_and_bias(ranks, num_ranks, do_expand, num_bias):
    ranks(combine, num_ranks, do_expand, num_bias, torch.bfloat16, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("do_expand", [True, False])
@pytest.mark.parametrize("num_bias", [0, 1])
def test_dtypes_without_cpu_sync(ranks, dtype, do_expand, num_bias):
    ranks(combine, 2, do_expand, num_bias, dtype, False)


@pytest.mark.parametrize("num_bias", [0, 2])
def test_one_reduction_if_several_are_not_allowed(ranks, num_bias):
    ranks(combine, 2, True, num_bias, torch.bfloat16, True, False)


def gradients(rank, num_ranks, group, do_expand):
    """dispatch's backward is combine with gradients of weights; combine's is a cached dispatch."""
    case = Case(rank, num_ranks, group, (5, 12), dtype=torch.float32).gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=case.most)
    rows, _, weights, handle, _ = buffer.dispatch(
        case.x, case.idx, case.weights, num_experts=case.experts, do_expand=do_expand, num_sms=24
    )
    assert handle.num_sms == 24
    grad_rows, grad_weights = random_like(rows, rank), random_like(weights, rank, 1)
    grad_x, grad_w, _ = buffer.combine(
        grad_rows, handle=handle, topk_weights=grad_weights, num_sms=handle.num_sms
    )
    assert same_bits(grad_x, case.combined(grad_rows, 1 if do_expand else None))
    all_grads = gather(group, grad_weights)
    want = torch.zeros_like(case.weights)
    for peer in range(num_ranks):
        if do_expand:
            for row, (s, t, k) in case.expanded(1, peer)[0].items():
                if s == rank:
                    want[t, k] = all_grads[peer][row]
        else:
            for row, (s, t) in enumerate(case.arrivals(peer)):
                for k in range(case.topk):
                    if s == rank and case.is_mine(int(case.idx[t, k]), peer):
                        want[t, k] = all_grads[peer][row, k]
    assert same_bits(grad_w, want)  # not summed over ranks: each choice has one owner
    grad = random_like(case.x, rank, 2)
    back, _, _, _, _ = buffer.dispatch(grad, handle=handle, num_sms=handle.num_sms)
    case.all_x = gather(group, grad)
    if not do_expand:
        assert same_bits(back, case.received(case.all_x))
    else:
        for row, (s, t, _) in case.expanded(1)[0].items():
            assert same_bits(back[row], case.all_x[s][t])


@pytest.mark.parametrize("do_expand", [True, False])
def test_backward_passes(ranks, do_expand):
    ranks(gradients, 3, do_expand)


def refusals(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (4,)).gather()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=case.most)
    rows, _, _, handle, _ = buffer.dispatch(case.x, case.idx, num_experts=case.experts)

    def refuses(match, x, *more, **arguments):
        with pytest.raises(weft.InvalidArgument, match=match):
            buffer.combine(x, *more, **arguments)

    refuses("expected what dispatch returned", rows, (1, 2))
    refuses("bias has shape", rows, handle, bias=rows[:1, :3])
    refuses("3 biases", rows, handle, bias=(case.x,) * 3)
    refuses("without allocate_on_comm_stream", rows, handle, previous_event=buffer.capture())
    refuses("rows has shape", rows[1:], handle)
    out, _, _ = buffer.combine(rows, handle)
    assert same_bits(out, case.combined(rows))


def test_what_is_refused(ranks):
    ranks(refusals, 2)
