# SPDX-License-Identifier: Apache-2.0
"""Sums of what the processes below `weft run` have told (`weft.stats`), as text and as a page."""

import collections
import html
from collections.abc import Mapping
from typing import Any

Waits = dict[int, list[float]]  # by rank, the seconds it waited for each rank of the group

_STYLE = """:root { color-scheme: light dark; --bg: #ffffff; --fg: #1b1f24; --soft: #6a737d;
  --rule: #d9dee3; --heat: 214 72 40 }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14171a; --fg: #e3e6e8; --soft: #9aa4ad; --rule: #333a41; --heat: 190 60 30 } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: right; font-weight: normal }
th { color: var(--soft) } .calls th { text-align: left; overflow-wrap: anywhere }
td { border: 1px solid var(--rule) }
.heat td { background: rgb(var(--heat) / var(--share)) }"""


def shown(text: str) -> str:
    """Escapes characters that would change a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def calls_of(found: Mapping[str, Any]) -> collections.Counter[str]:
    """Sums the processes' counts of each call."""
    total: collections.Counter[str] = collections.Counter()
    for told in found.values():
        total.update(told["calls"])
    return total


def waits_of(found: Mapping[str, Any]) -> dict[tuple[int, ...], Waits]:
    """Returns who waited for whom, by the ranks of a group in the world; groups of one rank left
    out. Processes that had the same rank one after another count together."""
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
    """Lists the number of processes, their calls, and each group's most awaited rank."""
    if not found:
        return ["nobody called Weft"]
    calls = calls_of(found)
    names = {name: shown(name) for name in calls}
    width = max(map(len, names.values()), default=0)
    text = [_processes(found)]
    text += [f"  {names[name]:{width}} {number:>13,}" for name, number in calls.most_common()]
    return text + [f"  {_slowest(ranks, waits)}" for ranks, waits in waits_of(found).items()]


def page(found: Mapping[str, Any], title: str) -> str:
    """Makes self-contained HTML."""
    title = html.escape(shown(title))
    rows = [
        f"<tr><th>{html.escape(shown(name))}</th><td>{number:,}</td></tr>"
        for name, number in calls_of(found).most_common()
    ]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        f"<p>{_processes(found)}.</p>",
        f'<div class="wide"><table class="calls">{"".join(rows)}</table></div>',
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
    """Makes the table: darker columns are ranks that others waited for."""
    most = max((seconds for row in waits.values() for seconds in row), default=0.0)

    def cell(seconds: float) -> str:
        shade = seconds / most if most > 0 else 0.0
        return f'<td style="--share: {shade:.3f}">{seconds:.3f}</td>'

    head = "".join(f"<th>{peer}</th>" for peer in ranks)
    body = "".join(
        f"<tr><th>{rank}</th>{''.join(map(cell, waits[rank]))}</tr>" for rank in sorted(waits)
    )
    return (
        f"<h2>Who waited for whom among {len(ranks)} ranks, seconds</h2>"
        f"<p>{_slowest(ranks, waits)}.</p>"
        f"<p>Rows: the rank that waited. Columns: the rank it waited for.</p>"
        f'<div class="wide"><table class="heat"><tr><th></th>{head}</tr>{body}</table></div>'
    )
