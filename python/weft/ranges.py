# SPDX-License-Identifier: Apache-2.0
"""Traces of the calls of a process while it runs: NVTX ranges for profilers, and call_log.py.

NVTX ranges are there if a profiler is attached, which names its library in NVTX_INJECTION64_PATH,
or with WEFT_NVTX=1; WEFT_NVTX=0 leaves them out."""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch

from weft import call_log

if TYPE_CHECKING:
    from weft.group import Group

_WANTED = os.environ.get("WEFT_NVTX", "1" if os.environ.get("NVTX_INJECTION64_PATH") else "0")
HAS_NVTX = _WANTED == "1"
# True if NVTX or the log shows calls; ask first.
IS_ON: bool = HAS_NVTX or call_log.IS_ON


def begin(name: str, group: Group | None = None, frame: FrameType | None = None) -> None:
    """Opens a range "weft: name" in this thread's open one. group: the call's. frame: of the
    function that makes the call, or of one below; None: the caller's caller."""
    if HAS_NVTX:
        with contextlib.suppress(RuntimeError):  # a torch without CUDA has no NVTX
            torch.cuda.nvtx.range_push(f"weft: {name}")
    if call_log.IS_ON:
        call_log.begin(name, None if group is None else group.rank, frame or sys._getframe(2))


def end() -> None:
    if HAS_NVTX:
        with contextlib.suppress(RuntimeError):
            torch.cuda.nvtx.range_pop()
    if call_log.IS_ON:
        call_log.end()
