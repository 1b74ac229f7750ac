# SPDX-License-Identifier: Apache-2.0
"""How often this process made each call that Weft stands for. Below `weft run` that is also in a
mapped file, which has all calls of a process that is killed, and a thread writes how long the
process waited for other ranks."""

import atexit
import contextlib
import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

FOLDER = "WEFT_RUN_COUNTS"  # the environment variable that names where to
_PERIOD = 0.25  # seconds
_FILE_BYTES = 1 << 14
_LINE = 80  # bytes in it for a call: digits, a space, its name, spaces, the end of a line
_DIGITS = 20

_counts: dict[str, int] = {}
_lock = threading.Lock()
_folder = os.environ.get(FOLDER)
_file: mmap.mmap | None = None
_places: dict[str, slice] = {}  # of each call's digits in the file
_writer: threading.Thread | None = None
_ended = threading.Event()
_is_forked = False  # exchanges, and what they have waited, are the parent's


def count(name: str) -> None:
    """Counts a call of this name."""
    try:
        _counts[name] += 1  # no other thread comes in between; a lock would cost more than this
    except KeyError:
        _counts.setdefault(name, 0)
        _counts[name] += 1
        if _folder:
            _keep(name)
    if name in _places:
        _file[_places[name]] = b"%*d" % (_DIGITS, _counts[name])  # type: ignore[index]


def counts() -> dict[str, int]:
    """Returns the counts by name, in the order of the first calls."""
    return dict(_counts)


def read(file: Path) -> dict[str, Any]:
    """Returns what a process has counted beside `file`, which tells its calls up to some moment."""
    with contextlib.suppress(OSError):
        lines = file.with_suffix(".calls").read_text().splitlines()
        return {line[_DIGITS:].strip(): int(line[:_DIGITS]) for line in lines if line[0] != "\0"}
    return {}


def _keep(name: str) -> None:
    """Gives the call a line in the file, unless the disk is full; the first starts the thread."""
    global _file, _writer
    with _lock:
        if _writer is None:
            _write({"calls": {}, "groups": []})
            with contextlib.suppress(OSError):
                _file = _mapped(Path(_folder, f"{os.getpid()}.calls"))
            _writer = threading.Thread(target=_write_on, name="weft run", daemon=True)
            _writer.start()
        at = len(_places) * _LINE
        if _file is not None and name not in _places and at + _LINE <= _FILE_BYTES:
            line = b"%*d %s" % (_DIGITS, 0, name.encode())
            _file[at : at + _LINE] = line.ljust(_LINE - 1)[: _LINE - 1] + b"\n"
            _places[name] = slice(at, at + _DIGITS)


def _mapped(file: Path) -> mmap.mmap:
    with file.open("w+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, _FILE_BYTES)  # writing where there is no room kills
        return mmap.mmap(opened.fileno(), _FILE_BYTES)


def _write_on() -> None:
    """Writes changed counts until the process ends."""
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
    """Writes, unless the folder is gone."""
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
    """Begins anew in a forked child: the counts are the parent's, and threads are not forked."""
    global _lock, _file, _writer, _ended, _is_forked
    _lock, _file, _writer = threading.Lock(), None, None
    _ended, _is_forked = threading.Event(), True
    _counts.clear()
    _places.clear()


atexit.register(_write_at_exit)
os.register_at_fork(after_in_child=_begin_in_child)
