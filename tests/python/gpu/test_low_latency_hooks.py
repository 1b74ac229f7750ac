# SPDX-License-Identifier: Apache-2.0
"""Low-latency calls with a receive hook on GPUs: two launches, of which the first waits for nobody,
with the bits of one. Ranks share the GPUs that there are."""

import pytest
import torch
import torch.distributed as dist

import weft
from weft.compat import deep_ep
from weft.compat.deep_ep.low_latency import LowLatencyMode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

HIDDEN, LOCAL, TOPK, NUM_MAX = 512, 4, 3, 32
BLOCK, THRESHOLD = 8, 5  # rows of a block of signals, and the value of one that is whole
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 4])


class Layer:
    """A dispatch and a combine of one buffer; the input's content may change."""

    def __init__(self, rank, num_ranks, group, tokens=(17, 0, 32, 5), **formats):
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.num_experts, self.formats = LOCAL * num_ranks, formats
        self.rank, self.num_tokens = rank, tokens[rank % len(tokens)]
        self.buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True)
        self.load(0)

    def load(self, seed):
        gen = torch.Generator().manual_seed(100 * seed + self.rank)
        x = torch.randn(self.num_tokens, HIDDEN, generator=gen).to(torch.bfloat16)
        weights, idx = torch.rand(self.num_tokens, self.num_experts, generator=gen).topk(TOPK)
        idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
        new = {"x": x, "weights": weights, "idx": idx}
        for name, tensor in new.items():
            if hasattr(self, name):
                getattr(self, name).copy_(tensor)
            else:
                setattr(self, name, tensor.to(self.device))

    def dispatch(self, has_hook, **more):
        """Rows [El, R * NUM_MAX, H] or (rows, scales), counts, handle, hook."""
        rows, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            self.x,
            self.idx,
            NUM_MAX,
            self.num_experts,
            return_recv_hook=has_hook,
            **{"use_fp8": False} | self.formats | more,
        )
        return rows, counts, handle, hook

    def experts(self, rows, counts):
        """bf16 rows for a combine, of those that are valid."""
        rows, scales = rows if isinstance(rows, tuple) else (rows, None)
        is_row = torch.arange(rows.size(1), device=self.device) < counts[:, None]
        rows = torch.where(is_row[:, :, None], rows.float(), 0)
        if scales is not None and scales.dtype == torch.float32:
            rows = rows * torch.where(is_row[:, :, None], scales, 0).repeat_interleave(128, 2)
        return (rows * 2).to(torch.bfloat16)

    def combine(self, rows, handle, has_hook, **more):
        out, _, hook = self.buffer.low_latency_combine(
            rows, self.idx, self.weights, handle, return_recv_hook=has_hook, **more
        )
        return out, hook

    def run(self, has_hook):
        """Results of a layer: rows, counts, sums and the handle."""
        rows, counts, handle, hook = self.dispatch(has_hook)
        if has_hook:
            hook()
        made = self.experts(rows, counts)
        out, hook = self.combine(made, handle, has_hook)
        if has_hook:
            hook()
        return [made, counts, out, handle]


def same(found, wanted):
    torch.cuda.synchronize()
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(one, other)


FORMATS = {
    "bf16": {},
    "fp8": {"use_fp8": True},
    "ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}


def eager(rank, num_ranks, group, name):
    layer = Layer(rank, num_ranks, group, **FORMATS[name])
    for seed in range(4):  # both places of eager rows, with peers a call behind
        layer.load(seed)
        same(layer.run(True), layer.run(False))


@RANKS
@pytest.mark.parametrize("name", FORMATS)
def test_hooks_give_the_bits_of_one_launch(ranks, name, num_ranks):
    ranks(eager, num_ranks, name)


def in_steps(rank, num_ranks, group, name):
    """Calls of the core give the bits of the steps that others take; on the stream of the call
    before, and on another one."""
    layer, other_stream = Layer(rank, num_ranks, group, **FORMATS[name]), torch.cuda.Stream()
    names = ("_dispatch_at_once", "_combine_at_once")
    usual = {name: getattr(LowLatencyMode, name) for name in names}
    seen = []

    def watched(name):
        def call(*given):
            made = usual[name](*given)
            seen.append(made is not None)
            return made

        return call

    try:
        for has_hook in (False, True):
            for name in names:
                setattr(LowLatencyMode, name, lambda *_: None)
            wanted = layer.run(has_hook)
            for name in names:
                setattr(LowLatencyMode, name, watched(name))
            for stream in (torch.cuda.current_stream(), other_stream, other_stream):
                torch.cuda.synchronize()
                seen.clear()
                with torch.cuda.stream(stream):
                    found = layer.run(has_hook)
                assert seen == [True, True]
                same(found, wanted)
                assert torch.equal(found[3].src_info, wanted[3].src_info)
    finally:
        for name in names:
            setattr(LowLatencyMode, name, usual[name])


@RANKS
@pytest.mark.parametrize("name", FORMATS)
def test_one_call_of_the_core_gives_the_bits_of_steps(ranks, name, num_ranks):
    ranks(in_steps, num_ranks, name)


def in_graph(rank, num_ranks, group, name):
    layer = Layer(rank, num_ranks, group, **FORMATS[name])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = [layer.run(True) for _ in range(3)]
    torch.cuda.synchronize()
    del warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = layer.run(True)
    for seed in range(5):
        layer.load(seed)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in kept[:3]]
        with torch.cuda.stream(stream):
            same(replayed, layer.run(seed % 2 == 0))


@RANKS
@pytest.mark.parametrize("name", FORMATS)
def test_both_launches_can_be_captured(ranks, name, num_ranks):
    ranks(in_graph, num_ranks, name)


def in_turns(rank, num_ranks, group, has_graph):
    """Two micro-batches of one buffer, each with a call under way while the other sends."""
    batches = [Layer(rank, num_ranks, group, tokens) for tokens in ((17, 32), (9, 1, 0))]
    batches[1].buffer = batches[0].buffer
    wanted = [batch.run(False) for batch in batches]

    def both():
        sent = [batch.dispatch(True) for batch in batches]
        made = []
        for batch, (rows, counts, _, hook) in zip(batches, sent):
            hook()
            made.append(batch.experts(rows, counts))
        back = [batch.combine(rows, one[2], True) for batch, rows, one in zip(batches, made, sent)]
        for _, hook in back:
            hook()
        return [[rows, one[1], out[0], one[2]] for rows, one, out in zip(made, sent, back)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            found = both()
            for one, other in zip(found, wanted):
                same(one, other)
    if has_graph:
        del found, one
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = both()
        for _ in range(3):
            graph.replay()
            for one, other in zip(found, wanted):
                same(one, other)


@RANKS
@pytest.mark.parametrize("has_graph", [False, True])
def test_two_calls_are_open_at_once(ranks, num_ranks, has_graph):
    ranks(in_turns, num_ranks, has_graph)


def first_alone(rank, num_ranks, group):
    """Rank 0's send has ended before any other rank has called."""
    layer = Layer(rank, num_ranks, group)
    wanted = layer.run(False)
    layer.run(True)  # what a first call makes is there

    def send(call, *given):
        torch.cuda.synchronize()
        dist.barrier(group)
        if rank == 0:
            sent = call(*given)
            torch.cuda.synchronize()
        dist.barrier(group)
        return sent if rank == 0 else call(*given)

    for _ in range(3):
        rows, counts, handle, hook = send(layer.dispatch, True)
        hook()
        made = layer.experts(rows, counts)
        out, hook = send(layer.combine, made, handle, True)
        hook()
        same([made, counts, out], wanted)


@RANKS
def test_a_send_ends_by_itself(ranks, num_ranks):
    ranks(first_alone, num_ranks)


def forgotten(rank, num_ranks, group):
    """All ranks hear of a hook that the last one forgot, and the calls after that are right."""
    forgets = rank == num_ranks - 1
    layer = Layer(rank, num_ranks, group)
    wanted = layer.run(False)
    *_, hook = layer.dispatch(True)
    layer.dispatch(True)[3]()
    if not forgets:
        hook()
    with pytest.raises(weft.InvalidArgument, match="before the last call was not called"):
        layer.dispatch(True)[3]()
        torch.cuda.synchronize()
        layer.buffer._pool.last.check()
    for _ in range(2):
        same(layer.run(True), wanted)
    _, _, handle, _ = layer.dispatch(True)
    with pytest.raises(weft.InvalidArgument, match="hook of this handle's"):
        layer.combine(wanted[0], handle, False)
    layer.buffer.clean_low_latency_buffer(NUM_MAX, HIDDEN, layer.num_experts)
    same(layer.run(True), wanted)


def test_a_forgotten_hook_is_refused(ranks):
    ranks(forgotten, 2)


def overlapped(rank, num_ranks, group, has_blocks):
    """Rows are written on another stream while the combine runs."""
    layer = Layer(rank, num_ranks, group)
    made, counts, out, handle = layer.run(False)
    size = BLOCK if has_blocks else made.size(1)
    blocks = made.size(1) // size
    signals = torch.zeros(LOCAL * blocks, dtype=torch.int32, device=layer.device)
    options = {"src_signals": signals, "src_signal_expect_value": THRESHOLD}
    if has_blocks:
        options = {
            "overlap": True,
            "packed_recv_count": counts,
            "comp_signal": signals,
            "block_m": BLOCK,
            "threshold": THRESHOLD,
            "num_sms": 3,
        }
    compute = torch.cuda.Stream()

    def write(late):
        with torch.cuda.stream(compute):
            for block in range(LOCAL * blocks):
                expert, begin = block // blocks, block % blocks * size
                rows = slice(begin, begin + size)
                late[expert, rows] = made[expert, rows]
                signals[block] = THRESHOLD

    # The first time rows are whole before; kernels are loaded then, which none may wait for later.
    for is_late in (False, True):
        for has_hook in (True,) if has_blocks else (True, False):
            late = torch.full_like(made, float("nan"))
            signals.zero_()
            torch.cuda.synchronize()
            if not is_late:
                write(late)
                torch.cuda.synchronize()
            found, hook = layer.combine(late, handle, has_hook, **options)
            if is_late:
                write(late)
            if has_hook:
                hook()
            torch.cuda.synchronize()
            assert torch.equal(found, out)


@RANKS
@pytest.mark.parametrize("has_blocks", [False, True])
def test_rows_are_sent_as_their_signals_come(ranks, num_ranks, has_blocks):
    ranks(overlapped, num_ranks, has_blocks)
