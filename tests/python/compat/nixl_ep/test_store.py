# SPDX-License-Identifier: Apache-2.0
"""How ranks meet in a store, each played by a thread."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import weft
from weft.compat.deep_ep import store


def test_a_rank_that_has_heard_of_a_refusal_is_in_no_meeting(monkeypatch):
    """Rank 0 refuses two calls and makes a third while rank 2 is still in the first."""
    shared, ranks = dist.HashStore(), (0, 1, 2)
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def sleep(seconds):
        if threading.current_thread().name.startswith("rank 2") and not may_go_on.is_set():
            is_waiting.set()
            may_go_on.wait(20)
        time.sleep(seconds)

    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(store, "_PATIENCE", 5)

    def call(rank, make=lambda: None):
        store.StoreRanks(shared, rank, ranks, "connect").agreed("connect", make, "the same")

    def hear(rank):
        with pytest.raises(weft.InvalidArgument, match="rank 0 refused the call: mine"):
            call(rank)

    def refuse():
        raise ValueError("mine")

    def be_late():
        hear(2)
        time.sleep(0.2)  # rank 0 looks
        hear(2)
        call(2)

    threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank {rank}") for rank in ranks]
    late = threads[2].submit(be_late)
    assert is_waiting.wait(20)
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            call(0, refuse)
    third = threads[0].submit(call, 0)
    for _ in range(2):
        hear(1)
    may_go_on.set()
    last = threads[1].submit(call, 1)
    for done in (late, third, last):
        done.result(20)
