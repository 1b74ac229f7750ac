# SPDX-License-Identifier: Apache-2.0
"""What the processes below `weft run` have told (`weft.stats`), summed, as text and as a page."""

import collections
import html
from collections.abc import Mapping
from typing import Any

Waits = dict[int, list[float]]  # by rank, the seconds it waited for each rank of the group

_STYLE = """body { font: 15px sans-serif; margin: 2em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 3px 9px; text-align: right; font-weight: normal }
th { color: #666 }
td { border: 1px solid #ddd }"""


def calls_of(found: Mapping[str, Any]) -> collections.Counter[str]:
    """How often all processes made each call."""
    total: collections.Counter[str] = collections.Counter()
    for told in found.values():
        total.update(told["calls"])
    return total


def waits_of(found: Mapping[str, Any]) -> dict[tuple[int, ...], Waits]:
    """By the ranks of a group in the world, who waited for whom; groups of one rank left out.
    Processes that had the same rank one after another count together."""
    waits: dict[tuple[int, ...], Waits] = {}
    for told in found.values():
        for group in told["groups"]:
            ranks = tuple(group["ranks"])
            if len(ranks) > 1 and "wait_seconds" in group:
                rows, rank = waits.setdefault(ranks, {}), ranks[group["rank"]]
                before = rows.get(rank, [0.0] * len(ranks))
                rows[rank] = [a + b for a, b in zip(before, group["wait_seconds"], strict=True)]
    return waits


def lines(found: Mapping[str, Any]) -> list[str]:
    """How many processes there were, their calls, and which rank of a group was waited for most."""
    if not found:
        return ["nobody called Weft"]
    calls = calls_of(found)
    width = max(map(len, calls), default=0)
    text = [_processes(found)]
    text += [f"  {name:{width}} {number:>13,}" for name, number in calls.most_common()]
    return text + [f"  {_slowest(ranks, waits)}" for ranks, waits in waits_of(found).items()]


def page(found: Mapping[str, Any], title: str) -> str:
    """HTML that needs nothing else."""
    title = html.escape(title)
    rows = [
        f"<tr><th>{html.escape(name)}</th><td>{number:,}</td></tr>"
        for name, number in calls_of(found).most_common()
    ]
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        f"<p>{_processes(found)}.</p><table>{''.join(rows)}</table>",
    ]
    parts += [_matrix(ranks, waits) for ranks, waits in waits_of(found).items()]
    return "\n".join(parts) + "\n"


def _processes(found: Mapping[str, Any]) -> str:
    return f"{len(found)} process{'es' if len(found) != 1 else ''} called Weft"


def _slowest(ranks: tuple[int, ...], waits: Waits) -> str:
    awaited = [sum(row[peer] for row in waits.values()) for peer in range(len(ranks))]
    most = max(range(len(ranks)), key=awaited.__getitem__)
    return (
        f"{len(ranks)} ranks waited {sum(awaited):.2f} s for each other, "
        f"{awaited[most]:.2f} s of them for rank {ranks[most]}"
    )


def _matrix(ranks: tuple[int, ...], waits: Waits) -> str:
    """The darker a column, the more the others waited for that rank."""
    most = max((seconds for row in waits.values() for seconds in row), default=0.0)

    def cell(seconds: float) -> str:
        shade = seconds / most if most > 0 else 0.0
        return f'<td style="background:rgba(214,72,40,{shade:.3f})">{seconds:.3f}</td>'

    head = "".join(f"<th>{peer}</th>" for peer in ranks)
    body = "".join(
        f"<tr><th>{rank}</th>{''.join(map(cell, waits[rank]))}</tr>" for rank in sorted(waits)
    )
    return (
        f"<h2>Who waited for whom among {len(ranks)} ranks, seconds</h2>"
        f"<p>{_slowest(ranks, waits)}.</p>"
        f"<p>Rows: the rank that waited. Columns: the rank it waited for.</p>"
        f"<table><tr><th></th>{head}</tr>{body}</table>"
    )
