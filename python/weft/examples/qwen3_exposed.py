# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange nothing hides, from a trace of one step.

An exchange kernel is known by its name, in every mode alike, and not by its stream: NCCL has
streams of its own, and the lane of exchanges also adds up residuals and puts rows in order. Where
copy engines carry rows, no kernel runs between the one that packs them and the one that takes what
has arrived; this time belongs to the exchange, whether the trace has the copies or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

Interval = tuple[float, float]

_PACKS = re.compile(r"weft::.*\bpack_(vector|bulk)\b")
_TAKES = re.compile(r"weft::.*\b(fan_out|sum)_(vector|bulk)\b")


class Kernel(NamedTuple):
    """One kernel of a trace, in whatever unit of time the trace has."""

    begin: float
    end: float
    name: str
    stream: int


@dataclass(frozen=True)
class Exposure:
    """Times in the unit of the trace."""

    span: float  # from the first kernel's begin to the last one's end
    exchange: float  # some exchange runs, copies included
    exposed: float  # some exchange runs, and no kernel of another kind on another stream
    idle: float  # nothing runs: the GPU waits for the host
    moving: float | None = None  # of `exchange`, without the waits for other ranks; None: not known


def is_exchange(name: str) -> bool:
    """Tokens and their counts, by NCCL or by Weft. Sums are of gradients: no exchange."""
    if "nccl" in name.lower():
        return "Reduce" not in name
    return "weft::" in name  # the library has no other kernels


def copies(kernels: Iterable[Kernel]) -> list[Kernel]:
    """What copy engines do between two kernels of a stream, as one more kernel."""
    found = []
    last: dict[int, Kernel] = {}
    for kernel in sorted(kernels):
        before = last.get(kernel.stream)
        if before is not None and _PACKS.search(before.name) and _TAKES.search(kernel.name):
            found.append(Kernel(before.end, kernel.begin, "weft::copies", kernel.stream))
        last[kernel.stream] = kernel
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order. Those that touch become one, empty ones go."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def difference(intervals: list[Interval], covers: list[Interval]) -> list[Interval]:
    """What of `intervals` no cover covers. Both as `union` gives them; so is the result."""
    left: list[Interval] = []
    first = 0
    for begin, end in intervals:
        while first < len(covers) and covers[first][1] <= begin:
            first += 1
        i = first
        while i < len(covers) and covers[i][0] < end:
            if begin < covers[i][0]:
                left.append((begin, covers[i][0]))
            begin = covers[i][1]
            i += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def exchange_times(kernels: Iterable[Kernel]) -> list[float]:
    """How long each kernel of an exchange took, copies included, in the order of their begins."""
    kernels = sorted(kernels)
    return [k.end - k.begin for k in sorted(kernels + copies(kernels)) if is_exchange(k.name)]


def exposure(
    kernels: Iterable[Kernel], is_exchange: Callable[[str], bool] = is_exchange
) -> Exposure:
    """Exchanges hide under kernels of other streams only, and not under other exchanges."""
    kernels = list(kernels)
    kernels += copies(kernels)
    busy = union((k.begin, k.end) for k in kernels)
    if not busy:
        return Exposure(0.0, 0.0, 0.0, 0.0)
    exchanges: dict[int, list[Interval]] = {}
    others: dict[int, list[Interval]] = {}
    for kernel in kernels:
        kind = exchanges if is_exchange(kernel.name) else others
        kind.setdefault(kernel.stream, []).append((kernel.begin, kernel.end))
    exposed: list[Interval] = []
    for stream, intervals in exchanges.items():
        elsewhere = (times for other, times in others.items() if other != stream)
        covers = union(time for times in elsewhere for time in times)
        exposed += difference(union(intervals), covers)
    span = busy[-1][1] - busy[0][0]
    exchange = length(union(time for times in exchanges.values() for time in times))
    return Exposure(span, exchange, length(union(exposed)), span - length(busy))
