# SPDX-License-Identifier: Apache-2.0
"""Low-latency calls of `Buffer` that end later: hooks, events, and how long ranks waited."""

import time

import pytest
import torch
import torch.distributed as dist
from buffer_cases import NUM_MAX, low_latency_case

import weft


def later(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group)
    arguments = (case.x, case.idx, NUM_MAX, case.num_experts)
    recv_x, _, handle, event, hook = buffer.low_latency_dispatch(
        *arguments, use_fp8=False, return_recv_hook=True
    )
    assert event.event is None
    hook()
    out, event, hook = buffer.low_latency_combine(
        recv_x, case.idx, case.weights, handle, return_recv_hook=True
    )
    hook()
    again, _, other, event, hook = buffer.low_latency_dispatch(
        *arguments, use_fp8=False, async_finish=True
    )
    assert hook is None
    event.current_stream_wait()
    used = handle.is_row
    assert torch.equal(again[used], recv_x[used])
    same, event, _ = buffer.low_latency_combine(
        again, case.idx, case.weights, other, async_finish=True
    )
    event.current_stream_wait()
    assert torch.equal(same, out)
    # Both results are still whole, and usable in any order.
    assert torch.equal(buffer.low_latency_combine(recv_x, case.idx, case.weights, handle)[0], out)


def test_hooks_and_events(ranks):
    ranks(later, 2)


def forgotten(rank, num_ranks, group):
    """The last rank forgets a hook: all hear of it, and the next call is right."""
    forgets = rank == num_ranks - 1
    case, buffer = low_latency_case(rank, num_ranks, group)
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    options = {"use_fp8": False, "return_recv_hook": True}
    one, _, handle, _, hook_of_one = buffer.low_latency_dispatch(*given, **options)

    def combine(name, hook, **more):
        """Refused until `hook` is called."""
        call = (one, case.idx, case.weights, handle)
        with pytest.raises(weft.InvalidArgument, match=name) as found:
            if not forgets:
                hook()
            buffer.low_latency_combine(*call, **more)
        assert forgets or f"rank {num_ranks - 1} refused" in str(found.value)
        assert isinstance(found.value, AssertionError)
        hook()
        return buffer.low_latency_combine(*call, **more)

    # A combine by the handle of a dispatch whose own hook was not called.
    own = "receive hook of this handle's low_latency_dispatch was not called"
    out, _, hook_of_out = combine(own, hook_of_one, return_recv_hook=True)
    # Of the last call it need not be called yet.
    other, _, _, _, hook_of_other = buffer.low_latency_dispatch(*given, **options)
    before = "receive hook of the low_latency_combine before the last call was not called"
    same, *_ = combine(before, hook_of_out)
    assert torch.equal(same, out)
    # A hook that is lost is told once.
    with pytest.raises(weft.InvalidArgument, match="low_latency_dispatch before the last call"):
        if not forgets:
            hook_of_other()
        buffer.low_latency_dispatch(*given, **options)
    again, _, _, _, hook = buffer.low_latency_dispatch(*given, **options)
    hook()
    assert torch.equal(again[handle.is_row], one[handle.is_row])
    # Who clears the buffer is asked for no hook of before.
    for _ in range(2):
        buffer.low_latency_dispatch(*given, **options)
    buffer.clean_low_latency_buffer(NUM_MAX, case.x.size(1), case.num_experts)
    buffer.low_latency_dispatch(*given, **options)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_hook_that_was_not_called_is_refused(ranks, num_ranks):
    ranks(forgotten, num_ranks)


def in_turns(rank, num_ranks, group, is_late):
    """Two micro-batches, each with a call under way most of the time, as serving engines have them.
    is_late: the hook of one's call runs after the next call of the other has been sent."""
    cases = [low_latency_case(rank, num_ranks, group)[0] for _ in range(2)]
    buffer = low_latency_case(rank, num_ranks, group)[1]
    options = {"return_recv_hook": True}

    def layers(case):
        x = case.x
        for _ in range(3):
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                x, case.idx, NUM_MAX, case.num_experts, use_fp8=False, **options
            )
            if is_late:
                yield
            hook()
            if not is_late:
                yield
            out = torch.empty_like(x)
            _, _, hook = buffer.low_latency_combine(
                rows, case.idx, case.weights, handle, out=out, **options
            )
            if is_late:
                yield
            hook()
            if not is_late:
                yield
            x = out
        made.append(x)
        yield

    made = []
    batches = [layers(case) for case in cases]
    for _ in range(7):
        for batch in batches:
            next(batch)
    assert len(made) == 2 and torch.equal(*made)


@pytest.mark.parametrize("is_late", [False, True])
def test_two_micro_batches_take_turns(ranks, is_late):
    ranks(in_turns, 2, is_late)


def late(rank, num_ranks, group):
    """A rank's waits for the others are longest for the one that is late."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
    back = (rows, case.idx, case.weights, handle)

    def dispatch(waits):
        buffer.low_latency_dispatch(*given, dispatch_wait_recv_cost_stats=waits)

    def combine(waits):
        buffer.low_latency_combine(*back, combine_wait_recv_cost_stats=waits)

    for call, who in ((dispatch, 1), (combine, num_ranks - 1)):
        own = torch.full((num_ranks,), 3, dtype=torch.int64)
        strided = torch.zeros((num_ranks, 2), dtype=torch.int64)[:, 0]
        for waits in (own, strided):
            before = waits.clone()
            for _ in range(ROUNDS):
                dist.barrier(group)
                time.sleep(LATE * (rank == who))
                call(waits)
            waited = waits - before
            assert waited[rank] == 0 and (waited >= 0).all()
            if rank != who:
                assert waited.argmax() == who and waited[who] > ROUNDS * LATE * 1e6 / 4, waited
        assert (strided._base[:, 1] == 0).all()


ROUNDS, LATE = 3, 0.1  # calls, and by how many seconds a rank comes late to each


def test_waits_for_each_rank_are_added_up(ranks):
    ranks(late, 3)
