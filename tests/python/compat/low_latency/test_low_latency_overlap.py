# SPDX-License-Identifier: Apache-2.0
"""Single-batch overlap: a low-latency combine that begins while its rows are being written."""

import threading
import time

import pytest
import torch
from buffer_cases import NUM_MAX, low_latency_case

import weft

BLOCK = 4  # rows of a block
THRESHOLD = 7
STEP = 0.002  # seconds between two blocks


def setting(rank, num_ranks, group):
    """A case, its buffer, what its experts have made, and a combine of some x."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    rows, count, handle, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
    )

    def combine(x, **options):
        out, _, hook = buffer.low_latency_combine(x, case.idx, case.weights, handle, **options)
        if hook is not None:
            hook()
        return out

    return case, rows, count, combine


def of_blocks(case, rows, count):
    """Signals of blocks of rows and the arguments that go with them."""
    signals = torch.zeros(case.local * -(-rows.size(1) // BLOCK) + 3, dtype=torch.int32)
    return signals, {
        "overlap": True,
        "return_recv_hook": True,
        "packed_recv_count": count,
        "comp_signal": signals,
        "block_m": BLOCK,
        "threshold": THRESHOLD,
    }


def of_experts(case, dtype=torch.uint32):
    signals = torch.zeros(case.local, dtype=dtype)
    return signals, {"src_signals": signals, "src_signal_expect_value": THRESHOLD}


def whole(rank, num_ranks, group):
    """Signals that are final change nothing, and those of blocks without rows never come."""
    case, rows, count, combine = setting(rank, num_ranks, group)
    plain = combine(rows)
    signals, by_block = of_blocks(case, rows, count)
    blocks = signals[:-3].view(case.local, -1)
    for expert in range(case.local):
        blocks[expert, : -(-int(count[expert]) // BLOCK)] = THRESHOLD
    assert torch.equal(combine(rows, **by_block), plain)
    for dtype in (torch.uint32, torch.int32):
        signals, by_expert = of_experts(case, dtype)
        signals.view(torch.int32).fill_(THRESHOLD)
        for more in ({}, {"overlap": True}, {"return_recv_hook": True}):
            assert torch.equal(combine(rows, **by_expert, **more), plain)
    # Without overlap the arguments of Hopper's form mean nothing, and none of Blackwell's do here.
    nothing = {"overlap": False, "src_signals": None, "src_signal_expect_value": 0}
    assert torch.equal(combine(rows, **nothing, num_sms=32), plain)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_rows_are_combined_as_without_signals(ranks, num_ranks):
    ranks(whole, num_ranks)


def written_late(rank, num_ranks, group, has_blocks):
    """Rows are written while the call runs, and each is read after its signal."""
    case, rows, count, combine = setting(rank, num_ranks, group)
    plain = combine(rows)
    signals, options = of_blocks(case, rows, count) if has_blocks else of_experts(case)
    late = torch.full_like(rows, float("nan"))
    marks = signals.view(torch.int32)

    def write():
        size = BLOCK if has_blocks else rows.size(1)
        blocks = -(-rows.size(1) // size)
        for block in range(case.local * blocks):
            time.sleep(STEP)
            expert, begin = block // blocks, block % blocks * size
            marks[block] = THRESHOLD - 1
            late[expert, begin : begin + size] = rows[expert, begin : begin + size]
            marks[block] = THRESHOLD

    writer = threading.Thread(target=write)
    writer.start()
    out = combine(late, **options)
    writer.join()
    assert torch.equal(out, plain)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_rows_are_read_when_their_signals_have_come(ranks, has_blocks):
    ranks(written_late, 2, has_blocks)


def refusals(rank, num_ranks, group):
    """Every rank refuses, and the next call is right."""
    case, rows, count, combine = setting(rank, num_ranks, group)
    signals, by_block = of_blocks(case, rows, count)
    _, by_expert = of_experts(case)

    def refused(match, options, **more):
        with pytest.raises(AssertionError, match=match):
            combine(rows, **options | more)

    refused("Overlap mode requires return_recv_hook=True", by_block, return_recv_hook=False)
    for name in ("block_m", "threshold", "num_sms"):
        refused(f"{name} = 0 .expected at least 1", by_block, **{name: 0})
    refused("comp_signal is None", by_block, comp_signal=None)
    refused("comp_signal has dtype", by_block, comp_signal=signals.float())
    refused(f"comp_signal has {case.local} elements", by_block, comp_signal=signals[: case.local])
    refused("packed_recv_count is None", by_block, packed_recv_count=None)
    refused("src_signals has 1 elements", by_expert, src_signals=signals[:1])
    refused("one of the two", by_block, **by_expert)
    assert combine(rows).shape == case.x.shape


def test_bad_signals_are_refused(ranks):
    ranks(refusals, 2)


def never(rank, num_ranks, group):
    """A block that is never whole ends the call at its deadline, which names it."""
    experts, stride = 2 * num_ranks, 8
    exchange = weft.Exchange(group, hidden=32, num_experts=experts, max_tokens=8, timeout=1.0)
    idx = torch.tensor([[1], [experts - 1]])
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    plan, out = exchange.plan_and_dispatch(
        idx, x, layout="expert_strided", expert_stride=stride, overflow="drop"
    )
    marks = torch.tensor([3, 3, 3, 3], dtype=torch.int32)
    waits_for = num_ranks - 1  # this rank's second expert has rows of all ranks
    if rank == waits_for:
        marks[2] = 2
    ready = weft.outputs.RowMarks(marks, 3, 4)
    text = f"block 0 of the rows of expert {experts - 1} in call .* .its mark is 2, wanted 3"
    with pytest.raises(weft.TimeoutError if rank == waits_for else weft.Error) as found:
        exchange.combine(plan, out.rows, ready=ready)
    if rank == waits_for:
        found.match(text)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_that_never_comes_is_named(ranks, num_ranks):
    ranks(never, num_ranks)


def of_no_blocks(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=32, num_experts=2 * num_ranks, max_tokens=8)
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    plan = exchange.plan(torch.zeros(2, 1, dtype=torch.int64))
    rows = exchange.dispatch(plan, x).rows
    marks = torch.ones(2, dtype=torch.int32)
    with pytest.raises(weft.InvalidArgument, match="marks of rows with expert_major"):
        exchange.combine(plan, rows, ready=weft.outputs.RowMarks(marks, 1))
    strided = exchange.plan(
        torch.zeros(2, 1, dtype=torch.int64), layout="expert_strided", expert_stride=8
    )
    rows = exchange.dispatch(strided, x).rows
    for block_rows, match in ((-1, "marks of -1 rows"), (3, r"marks has shape \[1, 2\]")):
        with pytest.raises(weft.InvalidArgument, match=match):
            exchange.combine(strided, rows, ready=weft.outputs.RowMarks(marks, 1, block_rows))
    assert torch.equal(exchange.combine(strided, rows, ready=weft.outputs.RowMarks(marks, 1)).x, x)


def test_marks_fit_the_blocks_of_the_plan(ranks):
    ranks(of_no_blocks, 2)
