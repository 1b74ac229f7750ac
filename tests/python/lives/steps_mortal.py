# SPDX-License-Identifier: Apache-2.0
"""Steps in which ranks die, leave, are given up and come back. The others' results are those of the
ranks that are left, from the call on that ends without the lost one."""

from __future__ import annotations

import gc
import signal
import struct
import sys
import time

from life import Life, Wrong, step
from steps_exchange import combined, dispatched, gradients, planned

import weft


def lost_by_calls(life: Life, gone: int) -> None:
    """Calls until one has ended without the rank; as many on each that is left."""
    for _ in range(1000):
        if gone not in life.exchanges[0].alive():
            return
        kept = planned(life)
        combined(life, kept, kept.batch, dispatched(life, kept, kept.batch))
        gradients(life)
    raise Wrong(f"rank {gone} is still there")


def who_goes(life: Life) -> int | None:
    """A rank that is no member after this step; the last one stays."""
    life.held()
    if len(life.members) == 1:
        return None
    gone = life.rng.choice(life.members)
    life.members.remove(gone)
    if life.rank == gone:
        life.tell(("leaving",))
    return gone


@step(1, lives="mortal")
def die(life: Life) -> None:
    """A rank is killed at any moment of its calls."""
    gone = who_goes(life)
    if gone is not None:
        if life.rank == gone:
            signal.setitimer(signal.ITIMER_REAL, life.own.choice([1e-6, life.own.random() * 0.01]))
        lost_by_calls(life, gone)


@step(0.5, lives="mortal")
def leave(life: Life) -> None:
    """A rank drops its exchange between two calls."""
    gone = who_goes(life)
    if gone is not None:
        if life.rank == gone:
            life.kept.clear(), life.exchanges.clear(), life.buffers.clear()
            gc.collect()
            sys.exit()
        lost_by_calls(life, gone)


@step(0.5, lives="mortal")
def give_up(life: Life) -> None:
    """Some of the others mask a rank, which is told so."""
    gone = who_goes(life)
    if gone is None:
        return
    exchange = life.exchanges[0].exchange
    if life.rank == gone:
        try:
            lost_by_calls(life, gone)
        except weft.PeerError:
            sys.exit()
        raise Wrong("a rank that was given up has not heard of it")
    while struct.unpack_from("i", life.progress, 4 * gone)[0] < life.number:
        time.sleep(1e-4)  # until it has ended its calls of before
    if life.rank == min(life.members) or life.own.random() < 0.5:
        exchange.mask([gone])
    lost_by_calls(life, gone)


@step(4, lives="mortal")
def come_back(life: Life) -> None:
    """A new process takes a lost rank's place; plans from before are refused then."""
    life.held()
    lost = [rank for rank in life.all if rank not in life.members]
    if not lost:
        return
    back, exchange = life.rng.choice(lost), life.exchanges[0].exchange
    first, life.members = min(life.members), sorted([*life.members, back])
    if life.rank == first:
        invited = (life.number, exchange.invitation(), life.members)
        life.tell(("invited", back, invited))
    exchange.readmit([back])
    life.kept.clear()
