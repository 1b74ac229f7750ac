# SPDX-License-Identifier: Apache-2.0
"""Log of each call on stderr, with WEFT_LOG=calls: at its beginning the name and arguments, at its
end the host time. ranges.py reports here."""

import contextlib
import itertools
import os
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

IS_ON: bool = os.environ.get("WEFT_LOG") == "calls"

_numbers = itertools.count(1)  # of this process's calls
_open = threading.local()  # .calls: those of this thread that have begun, the outermost first


class _Begun(NamedTuple):
    label: str
    when: float
    problem: BaseException | None  # being handled then


def begin(name: str, rank: int | None, frame: FrameType | None) -> None:
    """Logs a call's begin. rank: in its group, for programs without torch.distributed. frame: of
    the function that makes the call, or of one below. A nested call is not shown."""
    calls = vars(_open).setdefault("calls", [])
    if calls:
        calls.append(None)
        return
    label = f"{_who(rank)}call {next(_numbers)}: {name}"
    calls.append(_Begun(label, time.perf_counter(), sys.exc_info()[1]))
    _write(f"{label}({', '.join(_given(_public(frame)))})")


def end() -> None:
    begun = _open.calls.pop()
    if begun is None:
        return
    problem = sys.exc_info()[1]
    how = "returned"
    if problem is not None and problem is not begun.problem:
        how = f"raised {type(problem).__name__}"
    _write(f"{begun.label} {how} after {(time.perf_counter() - begun.when) * 1e3:.3f} ms")


def _who(rank: int | None) -> str:
    """Names the rank, in the world if there is one."""
    if dist.is_available() and dist.is_initialized():
        return f"[rank {dist.get_rank()}/{dist.get_world_size()}] "
    return "" if rank is None else f"[rank {rank}] "


def _public(frame: FrameType | None) -> FrameType | None:
    """Returns the nearest frame of a public function."""
    while frame is not None:
        name = frame.f_code.co_name
        if not name.startswith("_") or name.startswith("__"):
            return frame
        frame = frame.f_back
    return None


def _given(frame: FrameType | None) -> list[str]:
    """Lists arguments that are neither None nor False; tensors by dtype and shape."""
    if frame is None:
        return []
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [(name, frame.f_locals.get(name)) for name in names if name not in ("self", "ctx")]
    return [f"{name}={_text(value)}" for name, value in values if not _says_nothing(value)]


def _says_nothing(value: Any) -> bool:
    return value is None or value is False


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{device}"
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return str(value)
    if type(value) in (tuple, list):
        return f"({', '.join(map(_text, value))})"
    return f"<{type(value).__name__}>"


def _write(text: str) -> None:
    """Writes a line in one piece, among lines of other ranks. If that fails, the call goes on."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    with contextlib.suppress(Exception):  # no stderr, no room for it, or one that cannot encode it
        sys.stderr.write(f"{clock}.{int(now * 1000) % 1000:03d} weft call {text}\n")
        sys.stderr.flush()
