# SPDX-License-Identifier: Apache-2.0
"""`weft stats FILE ...`: shows what `weft run --json`, or ranks from weft.stats(), wrote, as text
and as a page."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.run import page

_MOST_SECONDS = 1e12  # of a wait; sums of what is larger are no numbers any more
_MOST_CALLS = 10**18  # and ranks
_MOST_BYTES = 1 << 26  # of a file: a process tells some kilobytes

_EXAMPLES = """examples:
  weft stats run.json --html waits.html
  weft stats rank0.json rank1.json      each json.dump(weft.stats(), file) of a rank

Exit codes: 0 good, 2 a file that cannot be read or written or holds something else."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what the files tell and writes the page. SystemExit with 2 if it cannot."""
    parser = argparse.ArgumentParser(
        prog="weft stats",
        description="Shows what was called how often, and which rank the others waited for.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="of `weft run --json` or `weft.stats()`"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page of who waited for whom here"
    )
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for file in options.files:
        try:
            found |= read(file)
        except OSError as error:
            parser.error(f"{page.shown(str(file))} cannot be read: {error.strerror}")
        except ValueError as error:
            parser.error(f"{page.shown(str(file))}: {error}")
    if options.html is not None:
        try:
            title = f"weft stats: {' '.join(map(str, options.files))}"
            options.html.write_text(page.page(found, title), encoding="utf-8")
        except OSError as error:
            parser.error(f"{page.shown(str(options.html))} cannot be written: {error.strerror}")
    first, *more = page.lines(found)
    try:
        print("\n".join([f"weft stats: {first}", *more]), flush=True)
    except OSError as error:
        sys.stdout = None  # what is left in it would fail again at the end
        parser.error(f"stdout cannot be written: {error.strerror}")
    return 0


def read(file: Path) -> dict[str, Any]:
    """Returns what the file tells (`weft.stats`), by its name and that of the process. Raises
    OSError; ValueError if it tells something else."""
    with file.open("rb") as opened:
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
    try:
        return _checked(file, json.loads(content))
    except RecursionError:
        raise ValueError("nested too deep") from None


def _checked(file: Path, told: Any) -> dict[str, Any]:
    _expect(isinstance(told, dict), "the whole", told, "an object")
    of_one = "calls" in told and "groups" in told
    found = {"": told} if of_one else told
    for process, one in found.items():
        _expect(isinstance(one, dict), process, one, "an object with calls and groups")
        _expect(isinstance(one.get("calls"), dict), "calls", one.get("calls"), "an object")
        _expect(isinstance(one.get("groups"), list), "groups", one.get("groups"), "a list")
        for name, number in one["calls"].items():
            _expect(_is_whole(number), f"calls: {name}", number, f"0 to {_MOST_CALLS:g}")
        for group in one["groups"]:
            _check_group(group)
    return {f"{file}:{process}": one for process, one in found.items()}


def _check_group(group: Any) -> None:
    _expect(isinstance(group, dict), "a group", group, "an object")
    ranks, rank = group.get("ranks"), group.get("rank")
    is_list = isinstance(ranks, list) and all(map(_is_whole, ranks))
    _expect(is_list and len(set(ranks)) == len(ranks), "ranks", ranks, "different numbers from 0")
    is_place = _is_whole(rank) and rank < len(ranks)
    _expect(is_place, "rank", rank, f"0 to {len(ranks) - 1}, a place among ranks")
    if "wait_seconds" not in group:  # the exchange was too broken to tell
        return
    waits = group["wait_seconds"]
    _expect(isinstance(waits, list), "wait_seconds", waits, "a list")
    _expect(len(waits) == len(ranks), "wait_seconds", waits, f"{len(ranks)} numbers, one a rank")
    for seconds in waits:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        is_time = is_number and 0 <= seconds <= _MOST_SECONDS
        _expect(is_time, "wait_seconds", seconds, f"seconds, 0 to {_MOST_SECONDS:g}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_CALLS


def _expect(is_so: bool, name: str, value: Any, wanted: str) -> None:
    if not is_so:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ValueError(f"{page.shown(name)} = {shown} (expected {wanted})")
