# SPDX-License-Identifier: Apache-2.0
"""How often this process made each call that Weft stands for. Below `weft run` a thread writes it
to a file, with how long the process waited for other ranks, so that little is lost where a process
is killed."""

import atexit
import json
import os
import threading
from pathlib import Path
from typing import Any

FOLDER = "WEFT_RUN_COUNTS"  # the environment variable that names where to
_PERIOD = 0.25  # seconds

_counts: dict[str, int] = {}
_lock = threading.Lock()
_folder = os.environ.get(FOLDER)
_writer: threading.Thread | None = None
_ended = threading.Event()
_is_forked = False  # exchanges, and what they have waited, are the parent's


def count(name: str) -> None:
    """One more call of this name."""
    try:
        _counts[name] += 1  # no other thread comes in between; a lock would cost more than this
    except KeyError:
        _counts.setdefault(name, 0)
        _counts[name] += 1
    if _folder and _writer is None:
        _begin_to_write()


def counts() -> dict[str, int]:
    """By name, in the order of the first calls."""
    return dict(_counts)


def _begin_to_write() -> None:
    global _writer
    with _lock:
        if _writer is None:
            _write({"calls": counts(), "groups": []})  # the process may be killed at once
            _writer = threading.Thread(target=_write_on, name="weft run", daemon=True)
            _writer.start()


def _write_on() -> None:
    """Until the process ends, as often as there is something new."""
    written = None
    while not _ended.wait(_PERIOD):
        told = _told()
        if told != written:
            _write(told)
            written = told


def _told() -> dict[str, Any]:
    from weft.tally import stats  # which imports this module

    return {"calls": counts(), "groups": []} if _is_forked else stats()


def _write(told: dict[str, Any]) -> None:
    """A folder that is gone by now wants nothing."""
    file = Path(_folder, f"{os.getpid()}.json")
    new = file.with_suffix(".new")
    try:
        new.write_text(json.dumps(told))
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)


def _write_at_exit() -> None:
    if not _folder:
        return
    _ended.set()
    if _writer is not None:
        _writer.join()  # once the interpreter has ended, a thread in a call aborts the process
    told = _told()
    if told["calls"] or told["groups"]:
        _write(told)


def _begin_in_child() -> None:
    """What the parent has counted is not the child's, and threads are not forked."""
    global _lock, _writer, _ended, _is_forked
    _lock, _writer, _ended, _is_forked = threading.Lock(), None, threading.Event(), True
    _counts.clear()


atexit.register(_write_at_exit)
os.register_at_fork(after_in_child=_begin_in_child)
