# SPDX-License-Identifier: Apache-2.0
"""The time in which all ranks have to come to a collective of set-up, and who is told of it."""

import os
import time

import pytest
import torch.distributed as dist

import weft
from oracle import HIDDEN
from ranks import after_call
from weft import arrivals
from weft.compat.deep_ep import Buffer

SHORT = 0.5  # seconds


def made(group, **options):
    arrivals.LEAST = SHORT
    after_call.append(lambda: setattr(arrivals, "LEAST", 5.0))
    return weft.Exchange(group, hidden=HIDDEN, num_experts=4, **options)


def late(rank, num_ranks, group):
    """Rank 1 does something else, in a new process group and in one that has an exchange."""
    found = []
    for pair in (dist.new_group([0, 1]), group):
        if rank == 1:
            while not dist.distributed_c10d._get_default_store().check(["over"]):
                time.sleep(0.01)  # the others have given up
        try:
            made(pair, timeout=SHORT)
        except weft.TimeoutError as error:
            found.append(str(error))
        if rank == 0:
            dist.distributed_c10d._get_default_store().set("over", "")
        dist.barrier()
        dist.distributed_c10d._get_default_store().delete_key("over")
        dist.barrier()
        made(pair, timeout=30).close()  # they meet again
    return found


def test_a_rank_that_does_not_come_to_an_exchange_is_named(ranks):
    for texts in ranks(late, 2):
        assert len(texts) == 2
        assert all("rank 1 did not come within 0.5 s" in text for text in texts)


def doors(rank, num_ranks, group):
    """A buffer of another library's interface, which one rank does not make."""
    pair = dist.new_group([0, 1])
    if rank == 0:
        after_call.append(lambda: setattr(arrivals, "LEAST", 5.0))
        arrivals.LEAST = SHORT
        with arrivals.within(SHORT), pytest.raises(weft.TimeoutError, match="rank 1 did not"):
            Buffer(pair)
    dist.barrier()


def test_a_rank_that_does_not_come_to_a_buffer_is_named(ranks):
    ranks(doors, 2)


def leaving(rank, num_ranks, group):
    pair = dist.new_group([0, 1])
    weft.Group.of(pair)
    if rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(weft.Error, match="rank 1 did not come"):
        made(pair, timeout=SHORT)


def test_a_rank_that_is_gone_is_named(ranks):
    ranks(leaving, 2, dying=(1,))


def wrong_environment(rank, num_ranks, group):
    os.environ["WEFT_RANKS_PER_DOMAIN"] = "two" if rank == 1 else "1"
    try:
        with pytest.raises(weft.InvalidArgument) as refused:
            weft.Group.of(dist.new_group([0, 1]))
    finally:
        del os.environ["WEFT_RANKS_PER_DOMAIN"]
    pair = dist.new_group([0, 1])
    weft.Group.of(pair)
    os.environ["WEFT_NUM_THREADS"] = "-1" if rank == 1 else "1"
    try:
        with pytest.raises(weft.InvalidArgument) as later:
            made(pair)
    finally:
        del os.environ["WEFT_NUM_THREADS"]
    made(pair)
    return str(refused.value), str(later.value)


def test_a_wrong_variable_of_one_rank_is_told_on_all(ranks):
    for rank, (first, later) in enumerate(ranks(wrong_environment, 2)):
        assert 'WEFT_RANKS_PER_DOMAIN = "two" is not a whole number' in first and "rank 1" in first
        assert 'WEFT_NUM_THREADS = "-1" is not a whole number' in later
        assert rank == 1 or "rank 1" in later
