# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while weights go to replicas, or gradients return: all others name it."""

import multiprocessing
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from weft import _core, copies
from weft.block_products import block_linear
from weft.exchange_begin import filled

RANKS, VICTIM, LOCAL, SHAPE = 3, 1, 2, (8, 8)
PLACEMENT = torch.tensor([[2], [4], [2]], dtype=torch.int32)  # the victim gives and gets
DEADLINE = 60.0  # seconds of the exchange, which nobody waits for
PATIENCE = 120.0  # seconds until three processes surely have begun, died and spoken


def calls_of(balance, verb, placement):
    weights = torch.ones(LOCAL, *SHAPE, requires_grad=True)
    grads = torch.ones(LOCAL + 1, *SHAPE)
    rows = torch.ones(4 * (LOCAL + 1), SHAPE[0], requires_grad=True)
    sizes = [4] * (LOCAL + 1)

    def experts(rows, weight):
        return block_linear(rows, weight, sizes)

    if verb == "push_weights":
        return lambda: balance.push_weights(placement, [weights.detach()])
    if verb == "reduce_grads":
        return lambda: balance.reduce_grads(placement, [grads])
    wgrad = verb.removeprefix("backward ")
    out = balance.apply(placement, experts, rows, weights, wgrad=wgrad)
    return lambda: out.sum().backward()


def dies_at(step):
    """From now on this process kills itself at that step of what it carries."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "begin":
        copies.carry = die
    elif step == "planned":  # the others wait for its rows

        def plan_and_die(exchange, routes, _, *, copy_engines, **choices):
            exchange.core.plan((routes, None, None, None), filled(_core.Options(), choices))
            die()

        weft.Exchange.plan_and_dispatch = plan_and_die
    else:  # it has the others' rows, and comes to no further call, or to no further round
        carry = copies.carry

        def carry_and_die(*given, **options):
            carry(*given, **options)
            die()

        copies.carry = carry_and_die


def run(rank, store, verb, step, placement, relays, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=40),
    )
    exchange = weft.Exchange(hidden=16, num_experts=RANKS * LOCAL)
    balance = weft.Balance(
        exchange,
        replicas=1,
        shapes=[SHAPE],
        dtypes=torch.float32,
        timeout=DEADLINE,
        relays=relays,
    )
    call = calls_of(balance, verb, placement)
    dist.barrier()
    if rank == VICTIM:
        dies_at(step)
    said = "nothing"
    try:
        while True:  # what the victim took part in may still be whole
            call()
            call = calls_of(balance, "push_weights", placement)
    except weft.Error as error:
        said = f"{type(error).__name__}: {error}"
    pipe.send(said)
    pipe.close()
    os._exit(0)  # the process group is no more


def check_death(tmp_path, monkeypatch, verb, step, placement=PLACEMENT, relays="auto"):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        args = (rank, str(tmp_path / "store"), verb, step, placement, relays, theirs)
        processes.append(context.Process(target=run, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for rank, pipe in enumerate(pipes):
            if rank == VICTIM:
                continue
            assert pipe.poll(PATIENCE), f"rank {rank} said nothing"
            said = pipe.recv()
            # Not that time was up: the others hear of it at once.
            assert said.startswith("PeerError") and f"rank {VICTIM}" in said, said
        processes[VICTIM].join(PATIENCE)
        assert processes[VICTIM].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("step", ["begin", "planned", "carried"])
@pytest.mark.parametrize(
    "verb", ["push_weights", "reduce_grads", "backward places", "backward blocks"]
)
def test_a_killed_rank_is_named_by_all_others(tmp_path, monkeypatch, verb, step):
    check_death(tmp_path, monkeypatch, verb, step)


# Of two rounds the victim sends in the first, as master, or in the second, as relay: of rank 0's
# expert 0, which it gets in the first.
@pytest.mark.parametrize("placement", [[[2], [-1], [2]], [[-1], [0], [0]]], ids=["master", "relay"])
@pytest.mark.parametrize("step", ["begin", "planned", "carried"])
def test_a_rank_is_killed_in_a_round_or_between_rounds(tmp_path, monkeypatch, step, placement):
    placement = torch.tensor(placement, dtype=torch.int32)
    check_death(tmp_path, monkeypatch, "push_weights", step, placement, "always")
