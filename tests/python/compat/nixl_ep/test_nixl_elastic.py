# SPDX-License-Identifier: Apache-2.0
"""Ranks of `nixl_ep.Buffer` that become more or fewer while others go on."""

import os
import signal
import time

import pytest
import torch
from buffer_cases import gather
from nixl_cases import (
    NUM_MAX,
    WAYS,
    check_rows,
    connected,
    exchange,
    make_case,
    meeting,
    rows_of,
    sized,
    sums,
)

import weft
from weft.compat.deep_ep import store

CAPACITY = 4


def status_of(buffer):
    status = torch.empty(buffer.group_size, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    return status.tolist()


def growing(rank, num_ranks, group, way, folder):
    """Two ranks, then three, as vLLM does it: the third gets ready by itself while they go on."""
    case = make_case(rank, CAPACITY, group)  # there are tokens for a fourth, too
    given = meeting(rank, num_ranks, group, way, folder)
    buffer = sized(rank, CAPACITY, given)
    if rank < 2:
        buffer.connect_ranks([0, 1])
        assert status_of(buffer) == [0, 0, -1, -1]
        for num_experts in (None, 4, 6):
            exchange(case, buffer, [0, 1], num_experts)
        buffer.connect_ranks([2], activate=False)
        assert status_of(buffer) == [0, 0, 1, -1]
        exchange(case, buffer, [0, 1], 6)
        buffer.update_mask_buffer(2)
    else:
        buffer.connect_ranks([0, 1, 2])
        for peer in (0, 1):
            buffer.update_mask_buffer(peer, mask=True)
        assert status_of(buffer) == [1, 1, 0, -1]
        exchange(case, buffer, [2], 6)
        for peer in (0, 1):
            buffer.update_mask_buffer(peer)
    assert status_of(buffer) == [0, 0, 0, -1]
    for num_experts in (None, 6):
        exchange(case, buffer, [0, 1, 2], num_experts)
    buffer.barrier()
    with pytest.raises(
        weft.InvalidArgument, match="num_experts = 4 .expected 2 for each of 3 to 4"
    ):
        buffer.dispatch(case.x, case.idx, NUM_MAX, 4)
    gather(group, None)  # rank 0 has the store
    buffer.destroy()


@pytest.mark.parametrize("way", ["file", "tcp"])
def test_a_group_grows(ranks, way, tmp_path):
    ranks(growing, 3, way, str(tmp_path))


def shrinking(rank, num_ranks, group, way, folder, gone):
    """Three ranks, then two, then three again, that which has gone with a new buffer."""
    rest = [one for one in range(num_ranks) if one != gone]
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, way, folder)
    buffer = sized(rank, num_ranks, given)
    for _ in range(2):
        buffer.connect_ranks(list(range(num_ranks)))
        exchange(case, buffer)
        gather(group, None)  # nobody goes before all have what they came for
        if rank == gone:
            buffer.destroy()
            buffer = sized(rank, num_ranks, given)
            continue
        with pytest.raises(AssertionError, match=r"remote_ranks = \[3\] .expected some of"):
            buffer.disconnect_ranks([3])
        buffer.disconnect_ranks([gone])
        assert status_of(buffer) == [-1 if one == gone else 0 for one in range(num_ranks)]
        with pytest.raises(AssertionError, match=f"rank_to_mask = {gone} is not connected"):
            buffer.update_mask_buffer(gone)
        exchange(case, buffer, rest)
        if gone == 2:
            exchange(case, buffer, rest, 4)
    gather(group, None)


@pytest.mark.parametrize("gone", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_shrinks(ranks, way, gone, tmp_path):
    ranks(shrinking, 3, way, str(tmp_path), gone)


def in_the_middle(rank, num_ranks, group, way, folder):
    """A masked rank has a number between those of the others."""
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, way, folder)
    buffer = sized(rank, num_ranks, given)
    buffer.connect_ranks(list(range(num_ranks)))
    exchange(case, buffer, masked=[] if rank == 1 else [1])  # between dispatch and combine
    members = [1] if rank == 1 else [0, 2]
    for peer in set(range(num_ranks)) - set(members):
        buffer.update_mask_buffer(peer, mask=True)
    exchange(case, buffer, members)
    waits = torch.zeros(num_ranks, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="statistics of waits of ranks"):
        buffer.dispatch(case.x, case.idx, NUM_MAX, None, None, waits)
    buffer.clean_mask_buffer()
    buffer.dispatch(case.x, case.idx, NUM_MAX, None, None, waits)
    assert waits[rank] == 0 and (waits >= 0).all()
    exchange(case, buffer)
    gather(group, None)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_in_the_middle_are_left_out(ranks, way, tmp_path):
    ranks(in_the_middle, 3, way, str(tmp_path))


def apart(rank, num_ranks, group, folder):
    """Ranks that do not ask for the same ones do not wait for ever."""
    given = meeting(rank, num_ranks, group, "file", folder)
    buffer = sized(rank, 3, given)
    store._PATIENCE = 1
    try:
        with pytest.raises(weft.TimeoutError, match=r"expected to ask for the same ranks"):
            buffer.connect_ranks([0, 1, 2][: 3 - rank])
    finally:
        store._PATIENCE = 300
    gather(group, None)
    buffer.connect_ranks([0, 1])
    with pytest.raises(NotImplementedError, match="the capacity stays"):
        buffer.update_memory_buffers(4, 2, 0)
    exchange(make_case(rank, num_ranks, group), buffer, [0, 1])


def test_ranks_that_ask_for_others(ranks, tmp_path):
    ranks(apart, 2, str(tmp_path))


def not_there(rank, num_ranks, group, way, folder):
    """Rank 1 does not come to the first call of all, and comes back."""
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, way, folder)
    buffer = connected(rank, num_ranks, given, timeout_ms=1500)
    if rank == 1:
        gather(group, None)
        with pytest.raises(weft.PeerError, match=r"was given up by ranks \[0, 2\]"):
            buffer.dispatch(case.x, case.idx, NUM_MAX, use_fp8=False)
        assert status_of(buffer) == [1, 0, 1]
    else:
        exchange(case, buffer, [0, 2])
        assert status_of(buffer) == [0, 1, 0] and buffer.lost_ranks() == {1}
        exchange(case, buffer, [0, 2])
        gather(group, None)
    buffer.connect_ranks(list(range(num_ranks)))
    exchange(case, buffer)
    assert status_of(buffer) == [0, 0, 0]
    gather(group, None)


@pytest.mark.parametrize("way", ["file", "tcp"])
def test_who_does_not_come_to_the_first_call_is_masked(ranks, way, tmp_path):
    ranks(not_there, 3, way, str(tmp_path))


def other_masks(rank, num_ranks, group, folder):
    """Ranks that come to their first call with other masks are not masked for that."""
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, "file", folder)
    buffer = connected(rank, num_ranks, given, timeout_ms=1500)
    if rank == 1:
        buffer.update_mask_buffer(2, mask=True)
        gather(group, None)
        time.sleep(0.3)
        with pytest.raises(weft.TimeoutError, match="expected the same mask"):
            buffer.dispatch(case.x, case.idx, NUM_MAX, use_fp8=False)
    else:
        gather(group, None)
        with pytest.raises(
            weft.TimeoutError, match=r"rank 1 with ranks \[0, 1\] .expected the same"
        ):
            buffer.dispatch(case.x, case.idx, NUM_MAX, use_fp8=False)
    gather(group, None)


def test_other_masks_in_the_first_call_are_named(ranks, tmp_path):
    ranks(other_masks, 3, str(tmp_path))


def lost(rank, num_ranks, group, way, how, folder):
    """Rank 1 is lost by a dispatch or a combine of the others, who go on, and comes back."""
    case = make_case(rank, num_ranks, group)
    given = meeting(rank, num_ranks, group, way, folder)
    buffer = connected(rank, num_ranks, given, timeout_ms=1000 if how == "late" else 30000)
    exchange(case, buffer)
    if how == "combine":
        recv_x, count, handle, *_ = buffer.dispatch(case.x, case.idx, NUM_MAX, use_fp8=False)
        check_rows(case, recv_x, count, handle)
    if rank != 1:
        if how == "combine":
            rows = [rows_of(one, recv_x.shape) for one in range(num_ranks)]
            out, *_ = buffer.combine(rows[rank], case.idx, case.weights, handle)
            want = sums(case, rows, masked=[1])
            torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)
            assert status_of(buffer) == [0, 1, 0]
        exchange(case, buffer, [0, 2])
        assert status_of(buffer) == [0, 1, 0]
        buffer.clean_mask_buffer()
        assert status_of(buffer) == [0, 1, 0]
        with pytest.raises(AssertionError, match="rank_to_mask = 1 is lost"):
            buffer.update_mask_buffer(1)
        exchange(case, buffer, [0, 2])
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "late":
        time.sleep(3)
        with pytest.raises(weft.PeerError, match="this rank was given up"):
            exchange(case, buffer)
        assert status_of(buffer) == [1, 0, 1]
    else:
        handle = None  # while one is alive, others wait for this rank
        buffer.destroy()
        buffer = sized(rank, num_ranks, given)
    if how == "killed":
        return
    buffer.connect_ranks([0, 1, 2])
    assert status_of(buffer) == [0, 0, 0]
    exchange(case, buffer)
    gather(group, None)


@pytest.mark.parametrize("way", ["file", "tcp", "group"])
@pytest.mark.parametrize("how", ["dispatch", "combine", "late"])
def test_a_lost_rank_is_masked_on_all_others_and_comes_back(ranks, way, how, tmp_path):
    ranks(lost, 3, way, how, str(tmp_path))


def test_a_killed_rank_is_masked_on_all_others(ranks, tmp_path):
    ranks(lost, 3, "file", "killed", str(tmp_path), dying=(1,))


def late_for_barrier(rank, num_ranks, group, way, folder):
    """A rank that does not come is masked by those that have waited, and may be taken in again."""
    case = make_case(rank, num_ranks, group)
    buffer = connected(
        rank, num_ranks, meeting(rank, num_ranks, group, way, folder), timeout_ms=2000
    )
    exchange(case, buffer)
    buffer.barrier()
    if rank != 1:
        buffer.barrier()
        assert status_of(buffer) == [0, 1, 0]
        exchange(case, buffer, [0, 2])
        buffer.update_mask_buffer(1)
    gather(group, None)
    assert status_of(buffer) == [0, 0, 0]
    buffer.barrier()
    exchange(case, buffer)
    gather(group, None)


@pytest.mark.parametrize("way", ["file", "tcp"])
def test_a_barrier_masks_who_does_not_come(ranks, way, tmp_path):
    ranks(late_for_barrier, 3, way, str(tmp_path))
