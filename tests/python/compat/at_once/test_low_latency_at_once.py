# SPDX-License-Identifier: Apache-2.0
"""Low-latency calls as they mostly are, each one call of the core, against the same calls in steps;
and what has to go in steps."""

import os
from pathlib import Path

import pytest
import torch
from buffer_cases import NUM_MAX, check_handle, low_latency_case
from interrupts import refused_by_interrupt
from ways import Ways

import weft
from weft.block_formats import from_tiles
from weft.compat.deep_ep.low_latency import LowLatencyMode

FORMATS = [
    {"use_fp8": False},
    {},
    {"round_scale": True},
    {"round_scale": True, "use_ue8m0": True},
    {"use_mxfp8": True},
    {"use_nvfp4": True},
    {"use_nvfp4": True, "use_ue8m0_for_sf": True, "x_global_scale": torch.full((3,), 0.25)},
]
WAYS = {
    (LowLatencyMode, "_dispatch_at_once"): "dispatch",
    (LowLatencyMode, "_combine_at_once"): "combine",
}


def parts_of(x):
    if not isinstance(x, tuple):
        return (x,)
    rows, scales = x
    if scales.dim() == 6:  # NVFP4, as grouped products want it
        rows, tiles = rows.permute(2, 0, 1), bits_of(scales).permute(5, 2, 4, 0, 1, 3)
        scales = from_tiles(tiles, rows.size(1))
    return rows, scales


def bits_of(part):
    return part.view(torch.uint8) if part.itemsize == 1 else part


def same_either_way(rank, num_ranks, group, options):
    case, buffer = low_latency_case(rank, num_ranks, group, hidden=512)
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    before = weft.stats()["calls"]
    made = []
    for in_steps in (True, False):
        stats = torch.full((case.local,), 5, dtype=torch.int32)
        out = torch.full_like(case.x, 3.0)
        with Ways(WAYS, in_steps) as ways:
            x, count, handle, event, hook = buffer.low_latency_dispatch(
                *given, cumulative_local_expert_recv_stats=stats, **options
            )
            rows = torch.arange(handle.shape[1]).view(1, -1, 1) * torch.ones(handle.shape)
            call = (rows.bfloat16(), case.idx, case.weights, handle)
            sums, combined, hook_of_combine = buffer.low_latency_combine(*call)
            same, *_ = buffer.low_latency_combine(*call, out=out)
        assert ways.seen == ([] if in_steps else ["dispatch", "combine", "combine"])
        assert event.event is hook is combined.event is hook_of_combine is None
        assert same is out and torch.equal(stats, count + 5) and handle.topk_idx is case.idx
        check_handle(case, handle, count)
        used = handle.is_row
        made.append((*(bits_of(part)[used] for part in parts_of(x)), count, sums, out))
        shapes = [(part.dtype, part.shape, part.stride()) for part in (*parts_of(x), count, sums)]
        made[-1] = (*made[-1], shapes)
    one, other = made
    assert one[-1] == other[-1]
    assert all(torch.equal(a, b) for a, b in zip(one[:-1], other[:-1], strict=True))
    after = weft.stats()["calls"]
    grown = {name: number - before.get(name, 0) for name, number in after.items()}
    assert grown["low_latency_dispatch"] == 2 and grown["low_latency_combine"] == 4


@pytest.mark.parametrize("options", FORMATS)
def test_calls_at_once_are_those_in_steps(ranks, options):
    ranks(same_either_way, 2, options)


def in_steps(rank, num_ranks, group):
    """A call with work beside it, or with other sizes than the call before, goes in steps, and the
    calls after it are right."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    wide, _ = low_latency_case(rank, num_ranks, group, hidden=256)
    options = {"use_fp8": False}

    def dispatch(case=case, num_max=NUM_MAX, **more):
        given = (case.x, case.idx, num_max, case.num_experts)
        x, count, handle, _, hook = buffer.low_latency_dispatch(*given, **options, **more)
        if hook is not None:
            hook()
        assert x.shape == (case.local, num_ranks * num_max, case.x.size(1))
        for expert, number in enumerate(count.tolist()):
            rank_of, token_of = handle._sources[expert, :number].T
            for row, source, token in zip(x[expert], rank_of.tolist(), token_of.tolist()):
                assert torch.equal(row, case.all_x[source][token])
        return x, handle

    strided = torch.zeros((case.local, 2), dtype=torch.int32)[:, 0]
    waits = torch.zeros(num_ranks, dtype=torch.int64)
    for more in (
        {"case": wide},
        {"num_max": 2 * NUM_MAX},
        {"cumulative_local_expert_recv_stats": strided},
        {"dispatch_wait_recv_cost_stats": waits},
    ):
        dispatch()
        with Ways(WAYS) as ways:
            dispatch(**more)
        assert ways.seen == []
        dispatch()
        with Ways(WAYS) as ways:
            dispatch()
        assert ways.seen == ["dispatch"]
    assert strided.sum() > 0 and strided._base[:, 1].sum() == 0

    x, handle = dispatch()
    given = (x, case.idx, case.weights, handle)
    out = buffer.low_latency_combine(*given)[0]
    gaps = torch.zeros(case.x.size(0), 2 * case.x.size(1), dtype=torch.bfloat16)[:, ::2]
    buffer.get_next_low_latency_combine_buffer(handle)[:] = x
    for more in (
        {"out": gaps},
        {"zero_copy": True},
        {"combine_wait_recv_cost_stats": waits},
    ):
        with Ways(WAYS) as ways:
            again, *_ = buffer.low_latency_combine(*given, **more)
        has_gaps = case.x.size(0) > 0 or "out" not in more
        assert ways.seen == ([] if has_gaps else ["combine"])
        assert torch.equal(again, out)
    with Ways(WAYS) as ways:
        other = buffer.low_latency_combine(x, case.idx.clone(), case.weights, handle)[0]
    assert ways.seen == ([] if case.x.size(0) > 0 else ["combine"])
    assert torch.equal(other, out)


def test_what_is_unusual_goes_in_steps(ranks):
    ranks(in_steps, 2)


def later(rank, num_ranks, group, option, in_turns):
    """With hooks and events, while no hook of before is still to be called."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    arguments = (case.x, case.idx, NUM_MAX, case.num_experts)
    plain, _, handle, *_ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    want = buffer.low_latency_combine(plain, case.idx, case.weights, handle)[0]
    has_hook = option == "return_recv_hook"
    options = {option: True}
    open_hook = None
    for i in range(3):
        with Ways(WAYS) as ways:
            rows, _, handle, event, hook = buffer.low_latency_dispatch(
                *arguments, use_fp8=False, **options
            )
            assert (hook is not None, event.event is not None) == (has_hook, not has_hook)
            assert handle.hook is hook
            if open_hook is not None:
                open_hook()
            hook() if has_hook else event.current_stream_wait()
            out, event, hook = buffer.low_latency_combine(
                rows, case.idx, case.weights, handle, **options
            )
            assert (hook is not None, event.event is not None) == (has_hook, not has_hook)
            if in_turns and has_hook:
                open_hook = hook
            else:
                hook() if has_hook else event.current_stream_wait()
        seen = ["dispatch", "combine"]
        assert ways.seen == (seen[1:] if in_turns and has_hook and i > 0 else seen)
        assert torch.equal(rows[handle.is_row], plain[handle.is_row])
        assert torch.equal(out, want)


@pytest.mark.parametrize("option", ["return_recv_hook", "async_finish"])
@pytest.mark.parametrize("in_turns", [False, True])
def test_calls_that_end_later(ranks, option, in_turns):
    ranks(later, 2, option, in_turns)


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def given_back(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group, hidden=8192)
    given = (case.x, case.idx, NUM_MAX, case.num_experts)

    def calls(count):
        for _ in range(count):
            rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
            with Ways(WAYS) as ways:
                buffer.low_latency_dispatch(*given)
                out = buffer.low_latency_combine(rows, case.idx, case.weights, handle)[0]
            assert ways.seen == ["dispatch", "combine"]
        return out.nbytes

    calls(20)
    before = resident()
    num_bytes = calls(400)
    assert num_bytes == NUM_MAX * 8192 * 2 and resident() - before < 400 * num_bytes / 4


def test_memory_of_what_is_returned_is_given_back(ranks):
    ranks(given_back, 1)


def wrong(rank, num_ranks, group):
    """All ranks hear what is wrong on one, though their own call is one of the core."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    is_wrong = rank == num_ranks - 1
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
    before = weft.stats()["calls"]
    for _ in range(2):
        with pytest.raises(weft.InvalidArgument) as found:
            buffer.low_latency_dispatch(
                case.x, case.idx[:, :0] if is_wrong else case.idx, *given[2:]
            )
        assert "low_latency_dispatch: topk_idx has 0 columns" in str(found.value)
        assert isinstance(found.value, AssertionError)
        buffer.low_latency_dispatch(*given)
        with pytest.raises(weft.InvalidArgument) as found:
            weights = case.weights.double() if is_wrong else case.weights
            buffer.low_latency_combine(rows, case.idx, weights, handle)
        assert "low_latency_combine: topk_weights has dtype torch.float64" in str(found.value)
        assert isinstance(found.value, AssertionError)
        buffer.low_latency_combine(rows, case.idx, case.weights, handle)
    after = weft.stats()["calls"]
    for name in ("low_latency_dispatch", "low_latency_combine"):
        assert after[name] - before.get(name, 0) == 4


def test_all_hear_what_one_refuses(ranks):
    ranks(wrong, 2)


def interrupted(rank, num_ranks, group):
    """The others hear of an interrupt, too, that comes before a call has begun."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    is_stopped = rank == num_ranks - 1
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)

    calls = (
        lambda: buffer.low_latency_dispatch(*given, use_fp8=False),
        lambda: buffer.low_latency_combine(rows, case.idx, case.weights, handle),
    )
    refused_by_interrupt(calls, LowLatencyMode, "_is_plain", is_stopped, num_ranks - 1)


def test_an_interrupt_before_the_call_is_told(ranks):
    ranks(interrupted, 2)
