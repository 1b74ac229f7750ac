# SPDX-License-Identifier: Apache-2.0
"""Calls on stderr, with WEFT_LOG=calls."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

import weft
from weft import call_log, ranges
from weft.compat.deep_ep import Buffer

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} weft call (.*)")
TIME = re.compile(r"after \d+\.\d{3} ms$")


def lines_of(text):
    """Texts of the lines, without the time of day and how long a call took."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [TIME.sub("after", one.group(1)) for one in found]


@contextlib.contextmanager
def logged():
    usual = call_log.IS_ON, ranges.IS_ON
    call_log.IS_ON = ranges.IS_ON = True
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield text
    finally:
        call_log.IS_ON, ranges.IS_ON = usual


def in_order(lines):
    """Without the numbers of calls, which count up by one."""
    numbers = [int(re.search(r"call (\d+): ", line).group(1)) for line in lines]
    first = numbers[0]
    assert numbers == [first + i // 2 for i in range(len(numbers))]
    return [re.sub(r"call \d+: ", "", line) for line in lines]


def calls(rank, num_ranks, group):
    buffer = Buffer(group, low_latency_mode=True)
    exchange = weft.Exchange(group, hidden=128, num_experts=4)
    x, idx = torch.ones(1 + rank, 128, dtype=torch.bfloat16), torch.zeros(1 + rank, 1).long()
    scales = torch.ones(1 + rank, 1)
    with logged() as text:
        layout = buffer.get_dispatch_layout(idx, 4)[:4]
        per_rank, _, per_expert, in_rank = layout
        buffer.dispatch(
            (x.view(torch.uint8)[:, :128], scales),
            topk_idx=idx,
            topk_weights=torch.ones(1 + rank, 1),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        with pytest.raises(weft.InvalidArgument):
            buffer.low_latency_dispatch(x, idx, 8, 3, use_nvfp4=True)
        plan = exchange.plan(idx)
        rows = exchange.dispatch(plan, x).rows
        exchange.combine(plan, rows)
    return lines_of(text.getvalue())


def test_each_call_is_shown_with_what_it_was_given(ranks):
    for rank, lines in enumerate(ranks(calls, 2)):
        t, who = 1 + rank, f"[rank {rank}/2] "
        told = [line.removeprefix(who) for line in in_order(lines)]
        assert told == [
            f"get_dispatch_layout(topk_idx=int64[{t}, 1], num_experts=4)",
            "get_dispatch_layout returned after",
            f"dispatch(x=(uint8[{t}, 128], float32[{t}, 1]), num_tokens_per_rank=int32[2], "
            f"is_token_in_rank=bool[{t}, 2], num_tokens_per_expert=int32[4], "
            f"topk_idx=int64[{t}, 1], topk_weights=float32[{t}, 1], expert_alignment=1, "
            "num_worst_tokens=0)",
            "dispatch returned after",
            f"low_latency_dispatch(x=bfloat16[{t}, 128], topk_idx=int64[{t}, 1], "
            "num_max_dispatch_tokens_per_rank=8, num_experts=3, use_fp8=True, use_nvfp4=True)",
            "low_latency_dispatch raised BadCall after",
            f"plan(topk_idx=int64[{t}, 1], layout=expert_major, pad_multiple=1, expert_stride=0, "
            "overflow=drop, order=rank, balance=0, num_sms=0)",
            "plan returned after",
            f"dispatch(plan=<Plan>, x=bfloat16[{t}, 128], quantise=none, num_sms=0)",
            "dispatch returned after",
            told[10],
            "combine returned after",
        ]
        assert re.match(r"combine\(plan=<Plan>, \w+=bfloat16\[\d, 128\]", told[10])


class Full:
    """A stream that cannot be written to, as on a full disk."""

    def write(self, text):
        raise OSError("No space left on device")


def without_stderr(rank, num_ranks, group):
    """A rank that cannot log makes its calls as the others do."""
    exchange = weft.Exchange(group, hidden=16, num_experts=4)
    buffer = Buffer(group)
    idx = torch.zeros(3, 1).long()
    for stderr in (None, Full()):
        with logged(), contextlib.redirect_stderr(stderr if rank == 1 else io.StringIO()):
            assert exchange.plan(idx).num_tokens == 3
            assert buffer.get_dispatch_layout(idx, 4)[0].tolist() == [3, 0]
            with pytest.raises(weft.InvalidArgument, match="rank 1 refused|x is a int"):
                weft.dispatch(exchange.plan(idx), 3 if rank == 1 else torch.zeros(3, 16))


def test_a_log_that_cannot_be_written_fails_no_call(ranks):
    ranks(without_stderr, 2)


def test_calls_of_threads_do_not_mix():
    with logged() as text:
        call_log.begin("one", 3, sys._getframe())
        call_log.begin("inside", 3, None)
        call_log.end()
        try:
            raise KeyError
        except KeyError:
            call_log.begin("inside", 3, None)
            call_log.end()
        call_log.end()
        call_log.begin("two", None, None)
        call_log.end()
    one, *rest = in_order(lines_of(text.getvalue()))
    assert rest == ["[rank 3] one returned after", "two()", "two returned after"]
    assert one == "[rank 3] one()"


PROGRAM = """
import tempfile
import torch, torch.distributed as dist
store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
import weft
exchange = weft.Exchange(hidden=8, num_experts=2)
plan = exchange.plan(torch.tensor([[0]]))
"""


@pytest.mark.parametrize("is_wanted", [False, True])
def test_the_variable_turns_it_on(is_wanted):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "WEFT_LOG": "calls" if is_wanted else "warn", "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "weft call" in line]
    assert len(lines) == 2 * is_wanted and ("call 1: plan(" in done.stderr) == is_wanted
