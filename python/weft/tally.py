# SPDX-License-Identifier: Apache-2.0
"""Counts of this process's calls and its seconds of waiting for other ranks, also as text for
Prometheus. exchange.py reports here."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from weft import _core
from weft.errors import Error
from weft.run import calls

if TYPE_CHECKING:
    from weft.exchange import Exchange
    from weft.group import Group

_tallies: dict[tuple[int, ...], Tally] = {}  # by the ranks of a group in the world


class Tally:
    """Sums of the `stats` of all exchanges of the same ranks, freed ones included."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self._past: dict[str, Any] = {}
        self._live: weakref.WeakSet[Exchange] = weakref.WeakSet()

    def follow(self, exchange: Exchange) -> None:
        self._live.add(exchange)

    def settle(self, core: _core.Exchange | None) -> None:
        """Adds the stats of `core`, about to be freed, unless it is too broken to tell."""
        if core is not None:
            with contextlib.suppress(Error):
                self._past = _sum(self._past, core.stats())

    def read(self) -> dict[str, Any]:
        total = self._past
        for exchange in list(self._live):
            with contextlib.suppress(Error):
                total = _sum(total, exchange.stats())
        return {"ranks": list(self._ranks), "rank": self._rank, **total}


def tally_of(group: Group) -> Tally:
    ranks = group.ranks
    return _tallies.setdefault(ranks, Tally(ranks, group.rank))


def stats() -> dict[str, Any]:
    """Returns what this process has done so far.

    "calls": how often each call was made under the name of another library. "groups": for each
    list of ranks that exchanged, `Exchange.stats` summed over its exchanges, with "ranks" (their
    numbers in the world, to which wait_seconds belong in turn) and "rank", this one's place among
    them. Reads a GPU's numbers, and waits for that.
    """
    groups = [tally.read() for tally in list(_tallies.values())]
    return {"calls": calls.counts(), "groups": groups}


def prometheus() -> str:
    """`stats` in the text format of Prometheus, for a server to hand out."""
    found = stats()
    lines = ["# TYPE weft_calls_total counter"]
    for name, number in found["calls"].items():
        lines.append(f'weft_calls_total{{call="{name}"}} {number}')
    lines += ["# TYPE weft_exchange_calls_total counter"]
    for group in found["groups"]:
        for op in ("plan", "dispatch", "combine"):
            number = group.get(f"num_{op}{'es' if op == 'dispatch' else 's'}", 0)
            lines.append(f'weft_exchange_calls_total{{{_labels(group)},op="{op}"}} {number}')
    lines += ["# TYPE weft_wait_seconds_total counter"]
    for group in found["groups"]:
        for peer, seconds in zip(group["ranks"], group.get("wait_seconds", ())):
            lines.append(f'weft_wait_seconds_total{{{_labels(group)},peer="{peer}"}} {seconds:.6f}')
    return "\n".join(lines) + "\n"


def _labels(group: dict[str, Any]) -> str:
    return f'rank="{group["ranks"][group["rank"]]}",group_size="{len(group["ranks"])}"'


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if not one:
        return dict(other)
    waits = [a + b for a, b in zip(one["wait_seconds"], other["wait_seconds"], strict=True)]
    total = {name: one[name] + other[name] for name in one if name != "wait_seconds"}
    return {**total, "wait_seconds": waits}
