# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs that are replayed while other calls go on: eager calls with handles from before, a
normal dispatch on the same buffer, exchanges that grow. Ranks share the GPUs that there are."""

import gc

import pytest
import torch

import weft
from weft.compat import deep_ep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

HIDDEN, LOCAL, TOPK, NUM_MAX = 512, 4, 3, 32
RANKS = pytest.mark.parametrize("num_ranks", [1, 2])


class Batch:
    """Inputs that a rank sends; content may change, places stay."""

    def __init__(self, rank, num_ranks, seed, num_tokens=NUM_MAX):
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.num_experts = LOCAL * num_ranks
        self.num_tokens, self.rank = num_tokens, rank
        self.x, self.weights, self.idx = (one.to(self.device) for one in self.drawn(seed))

    def drawn(self, seed):
        gen = torch.Generator().manual_seed(1000 * seed + self.rank)
        x = torch.randn(self.num_tokens, HIDDEN, generator=gen).to(torch.bfloat16)
        return x, *torch.rand(self.num_tokens, self.num_experts, generator=gen).topk(TOPK)

    def load(self, seed):
        for tensor, new in zip((self.x, self.weights, self.idx), self.drawn(seed), strict=True):
            tensor.copy_(new)


def send(buffer, batch):
    rows, _, handle, *_ = buffer.low_latency_dispatch(
        batch.x, batch.idx, NUM_MAX, batch.num_experts, use_fp8=False
    )
    return rows, handle


def bring(buffer, batch, rows, handle):
    return buffer.low_latency_combine(rows, batch.idx, batch.weights, handle)[0]


def layer(buffer, batch):
    return bring(buffer, batch, *send(buffer, batch))


def warm(work):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()


def captured(work):
    """The graph of work(), and what that returns."""
    warm(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    return graph, made


def normal_layer(buffer, batch):
    layout = buffer.get_dispatch_layout(batch.idx, batch.num_experts)
    rows, *_, handle, _ = buffer.dispatch(
        batch.x,
        num_tokens_per_rank=layout[0],
        num_tokens_per_expert=layout[2],
        is_token_in_rank=layout[3],
        topk_idx=batch.idx,
        topk_weights=batch.weights,
    )
    return buffer.combine(rows, handle)[0]


def handles_across_replays(rank, num_ranks, group):
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)
    replayed, eager = Batch(rank, num_ranks, 0), Batch(rank, num_ranks, 1)
    graph, out = captured(lambda: layer(buffer, replayed))
    held = [(Batch(rank, num_ranks, seed),) for seed in range(2, 6)]
    held = [(batch, *send(buffer, batch)) for (batch,) in held]
    rows, handle = send(buffer, eager)
    want = bring(buffer, eager, rows, handle).clone()
    wants = [bring(buffer, *one).clone() for one in held]
    for seed in range(10, 14):
        replayed.load(seed)
        expected = layer(buffer, replayed).clone()
        graph.replay()
        assert torch.equal(bring(buffer, eager, rows, handle), want)
        assert torch.equal(out, expected)
        for one, its in zip(held, wants, strict=True):
            assert torch.equal(bring(buffer, *one), its)


@RANKS
def test_a_replay_leaves_plans_of_eager_calls_alone(ranks, num_ranks):
    ranks(handles_across_replays, num_ranks)


def decode_and_prefill(rank, num_ranks, group):
    buffer = deep_ep.Buffer(group, 1 << 20, 1 << 20, low_latency_mode=True)
    decode, prefill = Batch(rank, num_ranks, 0), Batch(rank, num_ranks, 1, 700)
    graph, out = captured(lambda: layer(buffer, decode))
    want = []
    for num_tokens in (700, 5000):  # the second makes the exchange of normal calls grow
        prefill = Batch(rank, num_ranks, 1, num_tokens)
        normal_layer(buffer, prefill)
        torch.cuda.synchronize()
        gc.collect()
        junk = [torch.full((1 << 24,), float("nan"), device=decode.device) for _ in range(4)]
        out.zero_()
        decode.load(0)
        graph.replay()
        torch.cuda.synchronize()
        want.append(out.clone())
        del junk
        rows, handle = send(buffer, decode)
        assert handle.plan.exchange.max_tokens == NUM_MAX
        want.append(bring(buffer, decode, rows, handle).clone())
    graph.replay()
    first = layer(buffer, decode)
    assert all(torch.equal(first, other) for other in want)
    assert torch.equal(first, out)


@RANKS
def test_one_buffer_serves_replayed_decode_and_prefill(ranks, num_ranks):
    ranks(decode_and_prefill, num_ranks)


def larger_calls(rank, num_ranks, group):
    """The exchange, or the buffer's, is replaced by a larger one between two replays."""
    batch = Batch(rank, num_ranks, 0)
    exchange = weft.Exchange(
        group, hidden=HIDDEN, num_experts=batch.num_experts, max_tokens=64, device=batch.device
    )
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)
    budget = NUM_MAX * TOPK * num_ranks

    def step():
        plan = exchange.plan(batch.idx, row_budget=budget)
        rows = exchange.dispatch(plan, batch.x).rows
        return exchange.combine(plan, rows).x

    graph, out = captured(step)
    other, sums = captured(lambda: layer(buffer, batch))
    graph.replay()
    other.replay()
    want, wanted = out.clone(), sums.clone()
    for num_tokens in (100, 1000):
        more = Batch(rank, num_ranks, 3, num_tokens)
        exchange.plan(more.idx)
        buffer.low_latency_dispatch(more.x, more.idx, num_tokens, more.num_experts, use_fp8=False)
        torch.cuda.synchronize()
        gc.collect()
        junk = [torch.full((1 << 24,), float("nan"), device=batch.device) for _ in range(4)]
        out.zero_()
        sums.zero_()
        graph.replay()
        other.replay()
        torch.cuda.synchronize()
        del junk
        assert torch.equal(out, want) and torch.equal(sums, wanted)
    exchange.check()


@RANKS
def test_graphs_go_on_where_exchanges_have_grown(ranks, num_ranks):
    ranks(larger_calls, num_ranks)
