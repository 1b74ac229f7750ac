# SPDX-License-Identifier: Apache-2.0
"""Calls repeated a thousand times, the largest ones, and memory that PyTorch fills with NaN. Ranks
share the GPUs that there are."""

import pytest
import torch
from test_captured_calls import NUM_MAX, RANKS, Batch, captured, layer, send, warm

import weft
from weft.compat import deep_ep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ROUNDS = 1000


def many_rounds(rank, num_ranks, group, tokens, hidden):
    """Each round has other rows and routes; sums of whole numbers are exact."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    local, topk = 8, 4
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)
    gen = torch.Generator(device).manual_seed(rank)
    ones = torch.ones(tokens, topk, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(ROUNDS):
        x = torch.randint(-8, 9, (tokens, hidden), generator=gen, device=device).bfloat16()
        scores = torch.rand(tokens, local * num_ranks, generator=gen, device=device)
        idx = scores.topk(topk).indices
        has_hook, is_in_place = number % 2 == 1, number % 3 != 0
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, tokens, local * num_ranks, use_fp8=False, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        if is_in_place:
            buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
        out, _, hook = buffer.low_latency_combine(
            rows, idx, ones, handle, zero_copy=is_in_place, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        wrong += (out != x * topk).sum()
    assert int(wrong) == 0


@RANKS
@pytest.mark.parametrize(("tokens", "hidden"), [(300, 7168), (300, 128), (16, 7168)])
def test_a_thousand_rounds_of_low_latency(ranks, num_ranks, tokens, hidden):
    ranks(many_rounds, num_ranks, tokens, hidden)


def replayed_signals(rank, num_ranks, group):
    """A captured combine that begins while its rows are being written."""
    batch = Batch(rank, num_ranks, 0)
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)
    signals = torch.zeros(4, dtype=torch.int32, device=batch.device)
    late = torch.empty(4, num_ranks * NUM_MAX, batch.x.size(1), device=batch.device).bfloat16()
    beside = torch.cuda.Stream()

    def step():
        signals.zero_()
        late.fill_(float("nan"))
        rows, handle = send(buffer, batch)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for expert in range(4):
                late[expert] = rows[expert]
                signals[expert].fill_(1)
        out = buffer.low_latency_combine(
            late,
            batch.idx,
            batch.weights,
            handle,
            overlap=True,
            src_signals=signals,
            src_signal_expect_value=1,
        )[0]
        torch.cuda.current_stream().wait_stream(beside)
        return out

    graph, out = captured(step)
    wrong = torch.zeros((), dtype=torch.int64, device=batch.device)
    for seed in range(ROUNDS):
        if seed % 100 == 0:
            batch.load(seed // 100)
        else:
            batch.x.neg_()
            batch.idx.copy_(batch.idx.roll(1, 0))
        graph.replay()
        if seed % 50 == 0:
            wrong += (out != layer(buffer, batch)).sum()
        else:
            weights = batch.weights.sum(1, keepdim=True) * batch.x.float()
            is_near = (out - weights).abs() <= 0.02 * weights.abs() + 0.02  # not for NaN
            wrong += (~is_near).sum()
    assert int(wrong) == 0


@RANKS
def test_a_thousand_replays_read_the_signals_of_their_round(ranks, num_ranks):
    ranks(replayed_signals, num_ranks)


def largest(_rank, _num_ranks, group):
    """More than 2^31 elements of rows."""
    tokens, hidden, experts = 40_000, 7168, 8
    device = torch.device("cuda", 0)
    x = torch.arange(tokens, device=device)[:, None].remainder(251).bfloat16().repeat(1, hidden)
    idx = torch.arange(experts, device=device).repeat(tokens, 1)
    exchange = weft.Exchange(
        group,
        hidden=hidden,
        num_experts=experts,
        max_tokens=tokens,
        max_topk=experts,
        device=device,
    )
    plan = exchange.plan(idx, layout="expert_major", pad_multiple=1)
    rows = exchange.dispatch(plan, x).rows
    assert rows.numel() > 2**31
    assert torch.equal(rows.view(experts, tokens, hidden)[-1], x)
    assert torch.equal(exchange.combine(plan, rows).x, x * experts)


def test_rows_of_more_than_two_billion_elements(ranks):
    ranks(largest, 1)


def filled(rank, num_ranks, group):
    """NaN is written on the caller's stream, rows on another."""
    batch = Batch(rank, num_ranks, 0, 700)
    buffer = deep_ep.Buffer(group, 1 << 20)
    options = {"async_finish": True, "allocate_on_comm_stream": True}

    def normal():
        layout = buffer.get_dispatch_layout(batch.idx, batch.num_experts)
        before = deep_ep.Buffer.capture()
        rows, _, _, _, handle, event = buffer.dispatch(
            batch.x,
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
            topk_idx=batch.idx,
            topk_weights=batch.weights,
            previous_event=before,
            **options,
        )
        event.current_stream_wait()
        before = deep_ep.Buffer.capture()
        out, _, event = buffer.combine(rows, handle, previous_event=before, **options)
        event.current_stream_wait()
        return rows, out

    def both():
        small = Batch(rank, num_ranks, 1)
        return *normal(), layer(low_latency, small)

    low_latency = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)
    warm(both)
    want = both()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(50):
            found = both()
            assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@RANKS
def test_memory_is_filled_before_rows_come(ranks, num_ranks):
    ranks(filled, num_ranks)
