# SPDX-License-Identifier: Apache-2.0
"""EPBuffer.combine against loops, stage by stage and bit for bit."""

import pytest
import torch
from ep_oracle import Case, Combine, of_two_sizes
from hybrid_ep_oracle import gather, same_bits

from domain_cases import NUM_RANKS, two_domains
from weft.compat.deep_ep import ElasticBuffer, EPBuffer, EPHandle, EventOverlap

ALIGNMENT = 4


def made(group, case, **modes):
    sizes = {"num_max_tokens_per_rank": case.most, "hidden": case.x.size(1)}
    return EPBuffer(group, **sizes, **modes)


def dispatch(buffer, case, do_expand, do_cpu_sync=True, **more):
    return buffer.dispatch(
        case.x,
        case.idx,
        case.weights,
        num_experts=case.experts,
        expert_alignment=ALIGNMENT,
        do_expand=do_expand,
        do_cpu_sync=do_cpu_sync,
        **more,
    )


def sums(buffer, case, do_expand, num_bias, do_cpu_sync=True, domain=None):
    """Compares one combine; returns whether another order would have given other bits."""
    rows, _, weights, handle, _ = dispatch(buffer, case, do_expand, do_cpu_sync)
    y = of_two_sizes(rows.shape, 7 + case.rank, case.x.dtype)
    used = int(handle.psum_num_recv_tokens_per_expert[-1]) if do_expand else len(case.arrivals())
    y[used:] = float("nan")  # what is past the rows in use is not read
    biases = tuple(of_two_sizes(case.x.shape, 90 + seed, case.x.dtype) for seed in range(num_bias))
    bias = {0: None, 1: biases[0] if biases else None, 2: biases}[num_bias]
    out, back, event = buffer.combine(y, handle, weights, bias)
    assert isinstance(handle, EPHandle) and isinstance(event, EventOverlap) and event.event is None
    modes = {"alignment": ALIGNMENT if do_expand else None, "domain": domain}
    want = Combine(case, multiple=buffer.allow_multiple_reduction, **modes)(y, biases)
    assert out.dtype == case.x.dtype and same_bits(out, want)
    assert same_bits(back, torch.where(case.idx >= 0, case.weights, 0.0))
    alone, none, _ = buffer.combine(y.t().contiguous().t(), handle=handle, bias=bias)
    assert same_bits(alone, want) and none is None
    by_rank = case.combined(y, modes["alignment"], biases)
    return not torch.equal(by_rank, want)


def combine(rank, num_ranks, group, do_expand, multiple, do_cpu_sync):
    case = Case(rank, num_ranks, group, (19, 0, 23)).gather()
    buffer = made(group, case, allow_multiple_reduction=multiple)
    return [sums(buffer, case, do_expand, bias, do_cpu_sync) for bias in range(3)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_order_of_sums(ranks, num_ranks, do_expand, multiple, do_cpu_sync):
    differs = ranks(combine, num_ranks, do_expand, multiple, do_cpu_sync)
    # With several places to sum up, the order matters to these numbers.
    assert do_expand is False and num_ranks == 1 or any(map(any, differs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(ranks, dtype):
    ranks(of_type, 2, dtype)


def of_type(rank, num_ranks, group, dtype):
    case = Case(rank, num_ranks, group, (9, 4), dtype=dtype).gather()
    for do_expand in (False, True):
        sums(made(group, case), case, do_expand, 1)


def between_domains(rank, num_ranks, group, do_expand, multiple, hybrid):
    with two_domains() as hosts:
        case = Case(rank, num_ranks, hosts, (11, 7)).gather()
        buffer = made(hosts, case, allow_multiple_reduction=multiple, allow_hybrid_mode=hybrid)
        assert buffer.num_scaleout_ranks == (2 if hybrid else 1)
        domain = 2 if hybrid else None
        return [sums(buffer, case, do_expand, bias, domain=domain) for bias in (0, 2)]


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("multiple, hybrid", [(True, True), (True, False), (False, True)])
def test_stages_between_domains(ranks, do_expand, multiple, hybrid):
    assert any(map(any, ranks(between_domains, NUM_RANKS, do_expand, multiple, hybrid)))


def zeros(rank, num_ranks, group):
    """A negative zero stays only where two rows are added without a bias."""
    idx = torch.tensor([[0, 2, 4, 6], [0, 2, -1, -1], [-1, 5, -1, -1], [-1] * 4])
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    buffer = EPBuffer(group, num_max_tokens_per_rank=4, hidden=8)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=8)
    out, _, _ = buffer.combine(torch.full_like(rows, -0.0), handle)
    assert not out.any() and out.signbit()[:, 0].tolist() == [False, True, False, False]
    out, _, _ = buffer.combine(torch.full_like(rows, -0.0), handle, bias=torch.full_like(x, -0.0))
    assert not out.any() and not out.signbit().any()


def test_signs_of_zeros(ranks):
    ranks(zeros, 4)


def gradients(rank, num_ranks, group, do_expand):
    """dispatch's backward is combine with gradients of weights; combine's is a cached dispatch."""
    case = Case(rank, num_ranks, group, (5, 12), dtype=torch.float32).gather()
    buffer = made(group, case)
    rows, _, weights, handle, _ = dispatch(buffer, case, do_expand, num_sms=23)
    assert handle.num_sms == 24
    gen = torch.Generator().manual_seed(rank)
    grad_rows, grad_weights = (torch.randn(one.shape, generator=gen) for one in (rows, weights))
    _, grad_w, _ = buffer.combine(grad_rows, handle, grad_weights)
    all_grads = gather(group, grad_weights)
    want = torch.zeros_like(case.weights)
    for peer in range(num_ranks):
        for t in range(len(case.idx)):
            for k in range(case.topk):
                if not case.is_mine(int(case.idx[t, k]), peer):
                    continue
                if do_expand:
                    table = case.expanded(ALIGNMENT, peer)[0]
                    (row,) = (row for row, at in table.items() if at == (rank, t, k))
                    want[t, k] = all_grads[peer][row]
                else:
                    row = case.arrivals(peer).index((rank, t))
                    want[t, k] = all_grads[peer][row, k]
    assert same_bits(grad_w, want)
    grad = torch.randn(case.x.shape, generator=gen)
    back, _, _, same, _ = buffer.dispatch(
        grad, handle=handle, do_expand=do_expand, do_zero_padding=do_expand
    )
    case.all_x = gather(group, grad)
    assert same is handle
    if not do_expand:
        assert same_bits(back, case.received(case.all_x))
    else:
        for row, (s, t, _) in case.expanded(ALIGNMENT)[0].items():
            assert same_bits(back[row], case.all_x[s][t])


@pytest.mark.parametrize("do_expand", [True, False])
def test_backward_passes(ranks, do_expand):
    ranks(gradients, 3, do_expand)


def rows_of_any_number(rank, num_ranks, group, multiple):
    case = Case(rank, num_ranks, group, (6, 9)).gather()
    buffer = made(group, case, allow_multiple_reduction=multiple)
    rows, _, weights, handle, _ = dispatch(buffer, case, True)
    y = of_two_sizes(rows.shape, rank)
    want, want_weights, _ = buffer.combine(y, handle, weights)
    more = torch.cat([y, y[:2]]), torch.cat([weights, weights[:2]])
    out, back, _ = buffer.combine(more[0], handle, more[1])
    assert same_bits(out, want) and same_bits(back, want_weights)


@pytest.mark.parametrize("multiple", [True, False])
def test_expanded_rows_may_be_more(ranks, multiple):
    ranks(rows_of_any_number, 2, multiple)


def deferred(rank, num_ranks, group, do_expand):
    case = Case(rank, num_ranks, group, (8, 0, 5)).gather()
    buffer = made(group, case)
    want_rows = dispatch(buffer, case, do_expand)[0]
    flags = {"async_with_compute_stream": True, "defer_epilogue": True}
    event = dispatch(buffer, case, do_expand, **flags)
    assert isinstance(event, EventOverlap)
    rows, ids, weights, handle = event.wait()
    assert same_bits(rows, want_rows) and (ids is None) == do_expand
    assert event.wait() is None
    y = of_two_sizes(rows.shape, rank)
    bias = torch.zeros_like(case.x)
    event = buffer.combine(y, handle, weights, bias, **flags)
    bias.copy_(of_two_sizes(case.x.shape, 5))  # made between the call and its wait
    out, back = event.current_stream_wait(release_handle=True)
    assert event.event is None
    want, want_back, _ = buffer.combine(y, handle, weights, bias)
    assert same_bits(out, want) and same_bits(back, want_back)
    *now, event = buffer.combine(y, handle, async_with_compute_stream=True)
    with event:
        assert now[1] is None
    event.register_hook_after_wait(lambda: "told")
    assert event.wait() == "told"


@pytest.mark.parametrize("do_expand", [True, False])
def test_epilogues_that_are_deferred(ranks, do_expand):
    ranks(deferred, 3, do_expand)


def an_expert_twice(rank, num_ranks, group, kind, do_expand, multiple):
    """Each choice counts; without do_expand a token is one row on a rank all the same."""
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 16}
    buffer = kind(group, allow_multiple_reduction=multiple, **sizes)
    x = torch.arange(48.0).bfloat16().view(3, 16)
    idx = torch.tensor([[0, 0], [1, 2], [3, 3]])
    weights = torch.arange(6.0).view(3, 2)
    rows, _, row_weights, handle, _ = buffer.dispatch(
        x, idx, weights, num_experts=4, do_expand=do_expand
    )
    out, back, _ = buffer.combine(rows, handle, topk_weights=row_weights)
    times = torch.tensor([2, 2, 2] if do_expand else [1, 2, 1]).unsqueeze(1)
    assert torch.equal(out, x * times) and torch.equal(back, weights)


@pytest.mark.parametrize("kind", [ElasticBuffer, EPBuffer])
@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("do_expand", [True, False])
def test_an_expert_may_be_named_twice(ranks, kind, do_expand, multiple):
    ranks(an_expert_twice, 2, kind, do_expand, multiple)
