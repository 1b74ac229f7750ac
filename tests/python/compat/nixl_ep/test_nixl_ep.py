# SPDX-License-Identifier: Apache-2.0
"""`nixl_ep.Buffer` against loops over everybody's inputs."""

import inspect
import os
import signal
import threading
import time

import pytest
import torch
from buffer_cases import Case, dispatch, gather
from nixl_cases import (
    HIDDEN,
    NUM_MAX,
    TOKENS,
    WAYS,
    check_rows,
    connected,
    exchange,
    make_case,
    meeting,
    sums,
)

import weft
from weft.compat import deep_ep, nixl_ep
from weft.compat.deep_ep import store
from weft.compat.nixl_ep import Buffer


def round_trip(rank, num_ranks, group, way, folder):
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, way, folder)
    for _ in range(2):  # a second buffer on the same store
        buffer = connected(rank, num_ranks, given)
        buffer.connect_ranks([rank])  # known already
        buffer.set_tcp_store_group(None)  # vLLM's way to let go; the buffer lives on
        stats = torch.zeros(case.local, dtype=torch.int32)
        for call in (buffer.dispatch, buffer.low_latency_dispatch):
            for num_experts in (case.num_experts, None):
                recv_x, count, handle, event, hook = call(
                    case.x, case.idx, NUM_MAX, num_experts, stats, use_fp8=False
                )
                assert event.event is None and hook is None
                check_rows(case, recv_x, count, handle)
        assert torch.equal(stats, 4 * count)
        gen = torch.Generator().manual_seed(rank)
        rows = torch.randn(recv_x.shape, generator=gen).to(torch.bfloat16)
        want = sums(case, gather(group, rows))
        place = torch.empty_like(case.x)
        for call in (buffer.combine, buffer.low_latency_combine):
            out, event, hook = call(
                rows, case.idx, case.weights, handle, return_recv_hook=True, out=place
            )
            hook()
            assert out is place
            torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)
        buffer.get_next_combine_buffer(handle)[:] = rows
        again, *_ = buffer.combine(rows, case.idx, case.weights, handle, False, True)
        assert torch.equal(again, out)
        buffer.barrier()
        assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_() is not None
        buffer.destroy()
        with pytest.raises(AssertionError, match="was destroyed"):
            buffer.dispatch(case.x, case.idx, NUM_MAX)
    gather(group, None)  # rank 0 has the store


@pytest.mark.parametrize("way", WAYS)
def test_round_trip(ranks, way, tmp_path):
    ranks(round_trip, 2, way, str(tmp_path))


def test_round_trip_of_three(ranks, tmp_path):
    ranks(round_trip, 3, "file", str(tmp_path))


def quantised(rank, num_ranks, group, folder):
    """The bits of `deep_ep.Buffer`, whose own tests look into them."""
    case = make_case(rank, num_ranks, group)
    buffer = connected(rank, num_ranks, meeting(rank, num_ranks, group, "file", folder))
    other = deep_ep.Buffer(group, low_latency_mode=True)
    for options in ({}, {"round_scale": True}):
        sizes = (case.x, case.idx, NUM_MAX, case.num_experts)
        (recv, scales), count, *_ = buffer.dispatch(*sizes, **options)
        (want, want_scales), *_ = other.low_latency_dispatch(*sizes, **options)
        for expert, used in enumerate(count.tolist()):
            for one, two in (
                (recv.view(torch.uint8), want.view(torch.uint8)),
                (scales, want_scales),
            ):
                assert torch.equal(one[expert, :used], two[expert, :used])


def test_fp8_rows(ranks, tmp_path):
    ranks(quantised, 2, str(tmp_path))


def normal(rank, num_ranks, group, folder):
    case = Case(rank, group, 2 * num_ranks, 3, TOKENS)
    given = meeting(rank, num_ranks, group, "file", folder)
    buffer = connected(rank, num_ranks, given, low_latency_mode=False)
    layout = buffer.get_dispatch_layout(case.idx, case.num_experts)[:4]
    per_rank, per_host, per_expert, in_rank = layout
    rows, ids, weights, counts, handle, event = buffer.ht_dispatch(
        case.x, None, per_rank, per_host, in_rank, per_expert, case.idx, case.weights
    )
    assert event.event is None and counts == case.counts()
    assert torch.equal(rows, case.rows(case.all_x)) and torch.equal(ids, case.row_idx())
    out, _, _ = buffer.ht_combine(rows, handle, weights)
    want = case.summed(gather(group, rows))
    assert torch.equal(out, want)
    other = deep_ep.Buffer(group)
    assert torch.equal(dispatch(other, case)[0], rows)
    with pytest.raises(AssertionError, match="low_latency_mode is False"):
        buffer.dispatch(case.x, case.idx, NUM_MAX)


def test_normal_calls(ranks, tmp_path):
    ranks(normal, 2, str(tmp_path))


def masked(rank, num_ranks, group, folder):
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, "file", folder)
    status = torch.full((num_ranks,), 7, dtype=torch.int32)
    early = Buffer(rank=rank, **given)
    early.update_memory_buffers(num_ranks, 2, 0)
    early.query_mask_buffer(status)
    assert status.tolist() == [0 if r == rank else -1 for r in range(num_ranks)]

    buffer = connected(rank, num_ranks, given)
    buffer.query_mask_buffer(status)
    assert status.tolist() == [0] * num_ranks
    last = num_ranks - 1
    if rank == last:  # alone
        members = [last]
        with pytest.raises(AssertionError, match=f"rank_to_mask = {rank} is this rank"):
            buffer.update_mask_buffer(rank, True)
        for other in range(last):
            buffer.update_mask_buffer(other, True)
    else:
        members = [*range(last)]
        buffer.update_mask_buffer(last, mask=True)
    buffer.query_mask_buffer(status)
    assert status.tolist() == [int(r not in members) for r in range(num_ranks)]
    exchange(case, buffer, members)
    buffer.clean_mask_buffer()
    buffer.query_mask_buffer(status)
    assert status.tolist() == [0] * num_ranks
    exchange(case, buffer)
    gather(group, None)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_masked_ranks_are_left_out(ranks, num_ranks, tmp_path):
    ranks(masked, num_ranks, str(tmp_path))


def wrong_on_one_rank(rank, num_ranks, group, way, folder):
    """All ranks refuse to connect if one does; then a right call connects them."""
    given = meeting(rank, num_ranks, group, way, folder)
    last, everybody = num_ranks - 1, list(range(num_ranks))
    for capacity, options, match in (
        (last, {}, rf"a capacity of {last} .expected 0 to {last - 1}"),
        (num_ranks, {"activate": False}, "activate = False in normal mode"),
    ):
        buffer = Buffer(rank=rank, low_latency_mode=False, **given)
        if rank == 0:
            buffer.update_memory_buffers(capacity, 2, 0)
            with pytest.raises(AssertionError, match=match):
                buffer.connect_ranks(everybody, **options)
        else:
            buffer.update_memory_buffers(num_ranks, 2, 0)
            with pytest.raises(weft.InvalidArgument, match="rank 0 refused the call: .*" + match):
                buffer.connect_ranks(everybody)
    for capacity, local in ((num_ranks + 1, 2), (num_ranks, 3)):  # of the last rank but one
        mine = (capacity, local) if rank == last - 1 else (num_ranks, 2)
        buffer = Buffer(rank=rank, **given)
        buffer.update_memory_buffers(*mine, 0)
        match = f"num_ranks = {capacity} of {local} experts .*must be equal"
        with pytest.raises(weft.InvalidArgument, match=match):
            buffer.connect_ranks(everybody)
    connected(rank, num_ranks, given)
    gather(group, None)  # rank 0 has the store


@pytest.mark.parametrize("way", WAYS)
def test_what_one_rank_cannot_connect_all_hear(ranks, way, tmp_path):
    ranks(wrong_on_one_rank, 3, way, str(tmp_path))


def missing(rank, num_ranks, group, folder):
    given = meeting(rank, num_ranks, group, "file", folder)
    if rank == 0:
        store._PATIENCE = 1
        try:
            with pytest.raises(weft.TimeoutError, match=r"rank 0 waited 1 s .* \[1\] of \[0, 1\]"):
                connected(rank, num_ranks, given)
        finally:
            store._PATIENCE = 300
    gather(group, None)
    buffer = connected(rank, num_ranks, given)  # once it has come, on the same store
    case = make_case(rank, num_ranks, group)
    recv_x, count, handle, *_ = buffer.dispatch(case.x, case.idx, NUM_MAX, use_fp8=False)
    check_rows(case, recv_x, count, handle)


def test_a_rank_that_does_not_come_is_named(ranks, tmp_path):
    ranks(missing, 2, str(tmp_path))


def killed(rank, num_ranks, group, folder):
    """Rank 1, while it waits for rank 0."""
    if rank == 1:
        given = meeting(rank, num_ranks, group, "file", folder)
        waits = threading.Thread(target=connected, args=(rank, num_ranks, given), daemon=True)
        waits.start()
        while given["tcp_store_group"].num_keys() < 2:  # the store's own, and its word
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def started_again(rank, num_ranks, group, folder):
    given = meeting(rank, num_ranks, group, "file", folder)
    store._PATIENCE = 10
    try:
        buffer = connected(rank, num_ranks, given)
    finally:
        store._PATIENCE = 300
    case = make_case(rank, num_ranks, group)
    recv_x, count, handle, *_ = buffer.dispatch(case.x, case.idx, NUM_MAX, use_fp8=False)
    check_rows(case, recv_x, count, handle)
    buffer.barrier()


def test_a_rank_that_was_killed_while_it_waited_meets_the_others_again(ranks, tmp_path):
    ranks(killed, 2, str(tmp_path), dying=(1,))
    ranks(started_again, 2, str(tmp_path))


def test_refused_on_this_rank():
    with pytest.raises(AssertionError, match="timeout_ms = 0"):
        Buffer(timeout_ms=0)
    buffer = Buffer(rank=1)
    with pytest.raises(AssertionError, match="update_memory_buffers comes first"):
        buffer.connect_ranks([0, 1])
    with pytest.raises(AssertionError, match="update_memory_buffers comes first"):
        buffer.query_mask_buffer(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match="num_ranks = 1 .* this rank, 1"):
        buffer.update_memory_buffers(1, 2, 0)
    buffer.update_memory_buffers(2, 2, 0)
    for wrong, match in ((2, "= 2 .expected 0 to 1"), (0, "= 0 is not connected")):
        with pytest.raises(AssertionError, match=f"rank_to_mask {match}"):
            buffer.update_mask_buffer(wrong)
    buffer.update_mask_buffer(0, mask=True)  # it is left out already
    with pytest.raises(AssertionError, match=r"remote_ranks = \[0\] .expected some of \[\]"):
        buffer.disconnect_ranks([0])
    with pytest.raises(AssertionError, match=r"mask_status has shape \[3\]"):
        buffer.query_mask_buffer(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="neither group nor comm nor a store"):
        buffer.connect_ranks([0, 1])
    with pytest.raises(AssertionError, match="connect_ranks comes first"):
        buffer.dispatch(torch.zeros(1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64), NUM_MAX)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()
    with pytest.raises(AssertionError, match="= 6 .expected a multiple of 4"):
        Buffer.get_low_latency_buffer_size_hint(3, HIDDEN, 2, 4)


def test_places_of_arguments():
    """Arguments have the places that callers of nixl_ep give them."""
    new = "disable_ll_nvlink explicitly_destroy rank low_latency_mode group comm tcp_store_group"
    made = [*inspect.signature(Buffer).parameters]
    assert made == [*new.split(), "timeout_ms"]
    of_dispatch = (
        "self x topk_idx num_max_dispatch_tokens_per_rank num_experts "
        "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale "
        "use_ue8m0 async_finish return_recv_hook"
    )
    assert [*inspect.signature(Buffer.dispatch).parameters] == of_dispatch.split()
    of_combine = (
        "self x topk_idx topk_weights handle use_logfmt zero_copy async_finish return_recv_hook "
        "out combine_wait_recv_cost_stats"
    )
    taken = [*inspect.signature(Buffer.combine).parameters]
    assert taken[: len(of_combine.split())] == of_combine.split()
    assert nixl_ep.topk_idx_t == torch.int64 and Buffer.num_sms == 20
