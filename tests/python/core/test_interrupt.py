# SPDX-License-Identifier: Apache-2.0
"""Signals in a call that waits, and workers that are forked beside a training loop."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import weft
from oracle import HIDDEN, inputs
from weft import outputs

PATIENCE = 1.5  # seconds until the call surely waits; a signal before it is raised as well


def interrupted(rank, num_ranks, group, verb, number, raised):
    """Rank 0 waits in a call and gets a signal; the others call only afterwards."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4, timeout=300)  # longer than the test's
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    rows = weft.dispatch(plan, x.requires_grad_()).rows
    calls = {
        "plan": lambda: ex.plan(idx),
        "plan_and_dispatch": lambda: ex.plan_and_dispatch(idx, x),
        "combine": lambda: weft.combine(plan, rows.detach()),
        "backward": lambda: rows.sum().backward(),
    }
    usual = signal.getsignal(number)
    if rank == 0:
        if raised is SystemExit:
            signal.signal(number, lambda *_: sys.exit(3))
        timer = threading.Timer(PATIENCE, os.kill, (os.getpid(), number))
        try:
            with pytest.raises(raised):
                timer.start()
                calls[verb]()
        finally:
            timer.join()
            signal.signal(number, usual)
    dist.barrier(group)
    texts = []
    for call in (calls[verb], lambda: ex.plan(idx)):  # none takes the place of another
        with pytest.raises(weft.Error) as failed:
            call()
        texts.append(str(failed.value))
    return texts


CASES = [
    ("plan", signal.SIGINT, KeyboardInterrupt),
    ("plan_and_dispatch", signal.SIGINT, KeyboardInterrupt),
    ("combine", signal.SIGINT, KeyboardInterrupt),
    ("backward", signal.SIGINT, KeyboardInterrupt),
    ("combine", signal.SIGTERM, SystemExit),
]


@pytest.mark.parametrize(("verb", "number", "raised"), CASES)
def test_a_signal_ends_the_wait_and_all_ranks_hear_of_it(ranks, verb, number, raised):
    _, others = ranks(interrupted, 2, verb, number, raised)
    assert all("rank 0 was interrupted in call" in text for text in others)


def before_the_call(rank, num_ranks, group):
    """Ctrl-C while Python prepares a call: that call is refused, and the next one is right."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    usual = outputs.of_bytes

    def of_bytes(*given):
        outputs.of_bytes = usual
        signal.raise_signal(signal.SIGINT)
        return usual(*given)

    larger = idx.repeat(2000, 1)  # for which the others grow and ask again
    for call in (
        lambda: weft.dispatch(plan, x),
        lambda: ex.plan_and_dispatch(larger, x.repeat(2000, 1), row_budget=10),
    ):
        if rank == 0:
            outputs.of_bytes = of_bytes
        with pytest.raises(KeyboardInterrupt if rank == 0 else weft.InvalidArgument) as failed:
            call()
        told = str(failed.value)
        assert rank == 0 or ("rank 0 refused the call" in told and "KeyboardInterrupt" in told)
    plan = ex.plan(idx)
    out = weft.combine(plan, weft.dispatch(plan, x).rows).x
    torch.testing.assert_close(out, x * (idx >= 0).sum(1, keepdim=True))


def test_a_signal_before_a_call_refuses_it(ranks):
    ranks(before_the_call, 2)


LOADING = """
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import weft


class Tokens(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((5, 16), float(index + 1))


dist.init_process_group("gloo")
exchange = weft.Exchange(hidden=16, num_experts=4)
idx = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2], [3, 0]])
plan = exchange.plan(idx)
for epoch in range(2):  # workers are forked anew, each with its own copy of the exchange
    loader = DataLoader(Tokens(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for x in loader:
        x.requires_grad_()
        plan, out = weft.plan_and_dispatch(exchange, idx, x)
        tokens = weft.combine(plan, out.rows).x
        assert torch.equal(tokens, 2 * x)
        tokens.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
child = os.fork()
if child == 0:  # lets go of its copies, as a worker does that ends
    del plan, out, tokens
    exchange.close()
    del exchange
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
dist.barrier()
assert exchange.plan(idx).num_rows == 10
print("trained")
"""


def test_forked_workers_beside_a_training_loop(tmp_path):
    program = tmp_path / "loading.py"
    program.write_text(LOADING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
