# SPDX-License-Identifier: Apache-2.0
"""Normal calls and those of HybridEP on a GPU as one call of the core each, against the same calls
in steps: the same bits on every stream, in memory that nobody else writes, and in a graph."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from weft import fused_a2a
from weft.compat import deep_ep
from weft.compat.deep_ep.at_once import CallsAtOnce

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

HIDDEN, LOCAL, TOPK = 512, 4, 3
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 4])
NAMES = ("_layout_at_once", "_rows_at_once", "_rows_again_at_once", "_sums_at_once")
WAYS = [(CallsAtOnce, name) for name in NAMES]
WAYS += [(deep_ep.HybridEPBuffer, name) for name in ("_dispatch_at_once", "_combine_at_once")]


@contextlib.contextmanager
def ways(in_steps=False):
    """A list of the calls made at once, each by its name; with in_steps none are."""
    usual, seen = {way: getattr(*way) for way in WAYS}, []

    def watched(call, name):
        def made_by(*given):
            made = None if in_steps else call(*given)
            if made is not None:
                seen.append(name)
            return made

        return made_by

    try:
        for (kind, name), call in usual.items():
            setattr(kind, name, watched(call, name))
        yield seen
    finally:
        for (kind, name), call in usual.items():
            setattr(kind, name, call)


class Layer:
    """Buffers of a rank, and what goes through them."""

    def __init__(self, rank, num_ranks, group, device="cuda", tokens=(37, 0, 64, 5)):
        gen = torch.Generator().manual_seed(rank)
        num_tokens = tokens[rank % len(tokens)]
        self.group, self.num_experts = group, LOCAL * num_ranks
        scores = torch.rand(num_tokens, self.num_experts, generator=gen)
        weights, idx = scores.topk(TOPK)
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter(1, idx, True)
        x = torch.randn(num_tokens, HIDDEN, generator=gen).to(torch.bfloat16)
        self.x, self.idx, self.weights = x.to(device), idx.to(device), weights.to(device)
        self.map, self.probs = chosen.to(device), (scores * chosen).to(device)
        self.buffer = deep_ep.Buffer(group)
        self.by_expert = deep_ep.HybridEPBuffer(group, HIDDEN, max(tokens), LOCAL)

    def normal(self):
        layout = self.buffer.get_dispatch_layout(self.idx, self.num_experts)
        per_rank, _, per_expert, in_rank, _ = layout
        given = {"topk_idx": self.idx, "topk_weights": self.weights, "expert_alignment": 8}
        given |= {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert}
        *moved, handle, _ = self.buffer.dispatch(self.x, is_token_in_rank=in_rank, **given)
        again = self.buffer.dispatch(2 * self.x, handle=handle)[0]
        sums = self.buffer.combine(again, handle, moved[2])[:2]
        return handle, [per_rank, per_expert, in_rank, *moved, again, *sums]

    def hybrid(self, **routing):
        given = routing or {"routing_map": self.map, "probs": self.probs}
        call = self.by_expert.dispatch_with_permute
        rows, probs, _, counts, handle = call(hidden=self.x, pad_multiple=16, **given)
        assert counts.is_cpu and (counts.is_pinned() or not rows.is_cuda)
        call = self.by_expert.combine_with_unpermute
        return [rows, probs, counts, *call(hidden=rows, probs=probs, handle=handle)]

    def by_topk(self):
        routing = {"topk_idx": self.idx, "topk_weights": self.weights}
        return self.hybrid(num_of_experts=self.num_experts, **routing)

    def fused(self):
        x, weights = self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()
        routing = (self.idx, weights, self.num_experts, self.group)
        rows, experts, probs, counts, handle = fused_a2a.fused_dispatch(x, *routing)
        tokens, _ = fused_a2a.fused_combine(rows * 2, self.group, handle)
        torch.autograd.backward([tokens, probs], [tokens.detach(), probs.detach()])
        return [rows, experts, probs, counts, tokens, x.grad, weights.grad]

    def fused_by_expert(self):
        x, probs = self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()
        given = (x, self.map, probs, self.group, LOCAL)
        rows, weights, _, counts, handle = fused_a2a.hybrid_ep_dispatch(*given, pad_multiple=16)
        tokens = fused_a2a.hybrid_ep_combine(rows * 2, handle, pad_multiple=16)
        torch.autograd.backward([tokens, weights], [tokens.detach(), weights.detach()])
        return [rows, weights, counts, tokens, x.grad, probs.grad]

    def calls(self):
        """Each by its name, with how many are made at once."""
        yield "normal", 4, lambda: self.normal()[1]
        yield "hybrid", 2, self.hybrid
        yield "by_topk", 2, self.by_topk
        yield "fused", 4, self.fused
        yield "fused_by_expert", 3, self.fused_by_expert


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, list):
            assert one == other
        else:
            assert (one.dtype, one.device, one.stride()) == (
                other.dtype,
                other.device,
                other.stride(),
            )
            assert torch.equal(one, other)


def either_way(rank, num_ranks, group):
    layer, other_stream = Layer(rank, num_ranks, group), torch.cuda.Stream()
    for _, number, call in layer.calls():
        with ways(in_steps=True):
            wanted = call()
        kept = []
        for stream in (torch.cuda.current_stream(), other_stream, other_stream):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                call()  # the first on another stream has to wait for that of before
                with ways() as seen:
                    kept.append(call())
                torch.cuda.current_stream().synchronize()
            assert len(seen) == number
        torch.cuda.synchronize()
        for found in kept:  # nobody has written there since
            same(found, wanted)
    fused_a2a.free_buffer()
    fused_a2a.reset_hybrid_ep_buffer()


@RANKS
def test_calls_at_once_give_the_bits_of_steps(ranks, num_ranks):
    ranks(either_way, num_ranks)


def other_sizes(rank, num_ranks, group):
    """Numbers of rows for which the memory of the call before is too small or too large, and tokens
    for which the exchange has to grow."""
    layer = Layer(rank, num_ranks, group)
    gen = torch.Generator().manual_seed(rank)
    for num_tokens in (900, 930, 30, 5000, 1, 0):
        shape = (num_tokens, layer.num_experts)
        weights, idx = torch.rand(shape, generator=gen).topk(TOPK)
        layer.x = torch.randn(num_tokens, HIDDEN, generator=gen).to("cuda", torch.bfloat16)
        layer.idx, layer.weights = idx.cuda(), weights.cuda()
        for call, number in ((lambda: layer.normal()[1], 4), (layer.by_topk, 2)):
            call()
            with ways() as seen:
                found = call()
            assert len(seen) == number
            with ways(in_steps=True):
                same(found, call())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_calls_at_once_of_other_sizes(ranks, num_ranks):
    ranks(other_sizes, num_ranks)


def many_counts(rank, num_ranks, group):
    """Counts of many calls share pinned memory, but nothing that one can tell."""
    layer = Layer(rank, num_ranks, group)
    first = layer.hybrid()[2]
    wanted, counts = first.clone(), [layer.hybrid()[2] for _ in range(150)]
    counts[0].add_(1)
    assert counts[0]._version == 1 and counts[1]._version == 0 and counts[1]._base is None
    for one in (first, *counts[1:]):
        assert one.is_pinned() and torch.equal(one, wanted)
    assert torch.equal(counts[1].to("cuda", non_blocking=True).cpu(), wanted)


def test_counts_of_many_calls(ranks):
    ranks(many_counts, 1)


def in_graph(rank, num_ranks, group):
    """Calls that do not wait for the GPU can be captured."""
    layer, stream = Layer(rank, num_ranks, group), torch.cuda.Stream()
    x = layer.x.clone()

    def call():
        rows = layer.buffer.dispatch(x, handle=handle)[0]
        return rows, layer.buffer.combine(rows, handle)[0]

    with torch.cuda.stream(stream):
        handle, _ = layer.normal()
        wanted = call()
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), ways() as seen:
            found = call()
        assert seen == ["_rows_again_at_once", "_sums_at_once"]
        for _ in range(3):
            for one in found:
                one.zero_()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            same(found, wanted)
    graph.reset()


@RANKS
def test_calls_by_a_handle_can_be_captured(ranks, num_ranks):
    ranks(in_graph, num_ranks)
