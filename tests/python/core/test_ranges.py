# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges around calls, as far as they show without a profiler."""

import os
import subprocess
import sys

import pytest
import torch

import weft
from weft import ranges
from weft.compat.deep_ep import Buffer


def ranges_of_calls(_rank, _num_ranks, group):
    log = []

    class Nvtx:
        range_push = staticmethod(log.append)
        range_pop = staticmethod(lambda: log.append("end"))

    usual, torch.cuda.nvtx = torch.cuda.nvtx, Nvtx
    ranges.IS_ON = ranges.HAS_NVTX = True
    try:
        buffer = Buffer(group)
        idx = torch.tensor([[0, 1]])
        buffer.get_dispatch_layout(idx, 2)
        with pytest.raises(weft.InvalidArgument):
            buffer.get_dispatch_layout(idx, 0)
        exchange = weft.Exchange(group, hidden=8, num_experts=2)
        del log[4:]
        exchange.dispatch(exchange.plan(idx), torch.ones(1, 8))
    finally:
        ranges.IS_ON = ranges.HAS_NVTX = False
        torch.cuda.nvtx = usual
    layout = ["weft: get_dispatch_layout", "end"]
    assert log == [*layout, *layout, "weft: plan", "end", "weft: dispatch", "end"]


def test_each_call_is_a_range(ranks):
    ranks(ranges_of_calls, 1)


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"NVTX_INJECTION64_PATH": "/a/profiler.so"}, True),
        ({"NVTX_INJECTION64_PATH": "/a/profiler.so", "WEFT_NVTX": "0"}, False),
        ({"WEFT_NVTX": "1"}, True),
    ],
)
def test_there_are_ranges_where_a_profiler_is(environment, is_on):
    usual = {k: v for k, v in os.environ.items() if k not in ("NVTX_INJECTION64_PATH", "WEFT_NVTX")}
    code = "from weft import ranges; ranges.begin('x'); ranges.end(); print(ranges.IS_ON)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**usual, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == f"{is_on}\n"


def test_a_torch_without_nvtx_will_do(monkeypatch):
    tried = []

    class Nothing:
        @staticmethod
        def range_push(name):
            tried.append(name)
            raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda, "nvtx", Nothing)
    monkeypatch.setattr(Nothing, "range_pop", lambda: Nothing.range_push("end"), raising=False)
    monkeypatch.setattr(ranges, "HAS_NVTX", True)
    ranges.begin("x")
    ranges.end()
    assert tried == ["weft: x", "end"]
