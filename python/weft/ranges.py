# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges, in which profilers show the calls of a process. They are there if a profiler is
attached, which names its library in NVTX_INJECTION64_PATH, or with WEFT_NVTX=1; WEFT_NVTX=0 leaves
them out."""

import contextlib
import os

import torch

_WANTED = os.environ.get("WEFT_NVTX", "1" if os.environ.get("NVTX_INJECTION64_PATH") else "0")
IS_ON: bool = _WANTED == "1"


def begin(name: str) -> None:
    """A range "weft: name" of this thread, inside the one that is open."""
    if IS_ON:
        with contextlib.suppress(RuntimeError):  # a torch without CUDA has no NVTX
            torch.cuda.nvtx.range_push(f"weft: {name}")


def end() -> None:
    if IS_ON:
        with contextlib.suppress(RuntimeError):
            torch.cuda.nvtx.range_pop()
