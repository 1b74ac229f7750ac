# SPDX-License-Identifier: Apache-2.0
"""How often this process made each call that Weft stands for. Below `weft run` it is also written
to a file, at most once a second and at the end, so that little is lost where a process is killed;
at the end with how long the process waited for other ranks.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "WEFT_RUN_COUNTS"  # the environment variable that names where to
_PERIOD = 1.0  # seconds

_counts: dict[str, int] = {}
_lock = threading.Lock()
_folder = os.environ.get(FOLDER)
_next_write = 0.0
_is_forked = False  # exchanges, and what they have waited, are the parent's


def count(name: str) -> None:
    """One more call of this name."""
    global _next_write
    try:
        _counts[name] += 1  # no other thread comes in between; a lock would cost more than this
    except KeyError:
        _counts.setdefault(name, 0)
        _counts[name] += 1
    if _folder:
        with _lock:
            if time.monotonic() >= _next_write:
                _next_write = time.monotonic() + _PERIOD
                _write()


def counts() -> dict[str, int]:
    """By name, in the order of the first calls."""
    return dict(_counts)


def _write(groups: Sequence[dict[str, Any]] = ()) -> None:
    """A folder that is gone by now wants nothing."""
    file = Path(_folder, f"{os.getpid()}.json")
    new = file.with_suffix(".new")
    try:
        new.write_text(json.dumps({"calls": _counts, "groups": groups}))
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)


def _write_at_exit() -> None:
    if not _folder:
        return
    from weft.tally import stats  # which imports this module

    groups = [] if _is_forked else stats()["groups"]
    with _lock:
        if _counts or groups:
            _write(groups)


def _begin_in_child() -> None:
    """What the parent has counted is not the child's."""
    global _lock, _next_write, _is_forked
    _lock, _next_write, _is_forked = threading.Lock(), 0.0, True
    _counts.clear()


atexit.register(_write_at_exit)
os.register_at_fork(after_in_child=_begin_in_child)
