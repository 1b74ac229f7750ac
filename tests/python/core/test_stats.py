# SPDX-License-Identifier: Apache-2.0
"""Stats that a process tells of its calls and waits."""

import gc
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.compat.deep_ep import Buffer
from weft.run.calls import count


def calls(exchange, number):
    for _ in range(number):
        plan = exchange.plan(torch.tensor([[0, 1]]))
        exchange.combine(plan, exchange.dispatch(plan, torch.ones(1, 8)).rows)


def numbers(found):
    return found["num_plans"], found["num_dispatches"], found["num_combines"]


def told(rank, num_ranks, _group):
    # A process group that no other test has counted in.
    group = dist.new_group(list(range(num_ranks))[::-1])
    ranks = dist.get_process_group_ranks(group)

    def here():
        (one,) = [one for one in weft.stats()["groups"] if one["ranks"] == ranks]
        return one

    first = weft.Exchange(group, hidden=8, num_experts=num_ranks, max_tokens=1)
    before = numbers(here())
    calls(first, 2)
    second = weft.Exchange(group, hidden=8, num_experts=num_ranks)
    calls(second, 1)
    assert [b - a for a, b in zip(before, numbers(here()))] == [3, 3, 3]
    # What is closed, grown out of or collected has been.
    first.close()
    del second
    gc.collect()
    grown = weft.Exchange(group, hidden=8, num_experts=num_ranks, max_tokens=1)
    plan = grown.plan(torch.zeros((5, 1), dtype=torch.int64))
    grown.dispatch(plan, torch.ones(5, 8))
    found = here()
    assert found["num_dispatches"] - before[1] == 4
    assert found["rank"] == ranks.index(rank) and len(found["wait_seconds"]) == num_ranks
    buffer = Buffer(group)
    once = weft.stats()["calls"].get("get_dispatch_layout", 0)
    buffer.get_dispatch_layout(torch.tensor([[0]]), num_ranks)
    assert weft.stats()["calls"]["get_dispatch_layout"] == once + 1


def test_stats_are_of_all_exchanges_that_there_have_been(ranks):
    ranks(told, 2)


def asked_meanwhile(rank, num_ranks, group, file, on_peer_loss):
    exchange = weft.Exchange(
        group, hidden=8, num_experts=num_ranks, timeout=15, on_peer_loss=on_peer_loss
    )
    plan = exchange.plan(torch.tensor([[0, 1]]))
    if rank == 1:  # late until the other has its answers
        deadline = time.monotonic() + 10
        while not Path(file).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Path(file).exists()
        calls(exchange, 1)
        return
    before = exchange.stats()["wait_seconds"][1]

    def ask():
        while exchange.stats()["wait_seconds"][1] == before:  # the call waits by now
            pass
        assert exchange.report().alive == [0, 1] and not exchange.is_open(plan)
        assert any(one["rank"] == 0 for one in weft.stats()["groups"])
        assert "weft_wait_seconds_total" in weft.prometheus()
        Path(file).touch()

    thread = threading.Thread(target=ask)
    thread.start()
    calls(exchange, 1)
    thread.join()
    assert numbers(exchange.stats()) == (2, 1, 1)


@pytest.mark.parametrize("on_peer_loss", ["fail", "shrink"])
def test_a_rank_that_waits_in_a_call_answers_other_threads(ranks, tmp_path, on_peer_loss):
    ranks(asked_meanwhile, 2, str(tmp_path / "answered"), on_peer_loss)


def text(_rank, num_ranks, group):
    calls(weft.Exchange(group, hidden=8, num_experts=num_ranks), 1)
    Buffer(group).get_dispatch_layout(torch.tensor([[0]]), num_ranks)
    lines = weft.prometheus().splitlines()
    sample = re.compile(r'weft_[a-z_]+\{([a-z_]+="\w+",?)+\} \d+(\.\d+)?')
    kinds = [line.split()[2] for line in lines if line.startswith("#")]
    assert all(line.startswith("# TYPE ") or sample.fullmatch(line) for line in lines)
    assert kinds == [
        "weft_calls_total",
        "weft_exchange_calls_total",
        "weft_wait_seconds_total",
    ]
    assert any(line.startswith('weft_calls_total{call="get_dispatch_layout"} ') for line in lines)
    assert any('op="dispatch"} ' in line for line in lines)
    assert sum("weft_wait_seconds_total{" in line for line in lines) >= num_ranks


def test_stats_can_be_read_by_prometheus(ranks):
    ranks(text, 2)


def test_calls_of_several_threads_are_all_counted():
    name, each = "a call of several threads", 20_000

    def many():
        for _ in range(each):
            count(name)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert weft.stats()["calls"][name] == len(threads) * each
