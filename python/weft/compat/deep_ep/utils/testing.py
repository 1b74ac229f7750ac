# SPDX-License-Identifier: Apache-2.0
"""Measurements for programs written for `deep_ep`."""

import re
import time
from collections.abc import Callable
from typing import Any

import torch

from ..checks import check

__all__ = ["bench", "flush_l2_cache", "parse_num_bytes"]

_CACHE_BYTES = 256_000_000  # more than any GPU's second cache has
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def flush_l2_cache(enabled: bool = True) -> None:
    """Fills the GPU's second cache with something else, if there is a GPU."""
    if enabled and torch.cuda.is_available():
        torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device="cuda")


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Returns mean, least and most seconds of fn(), over num_tests runs but the first: of the GPU's
    current stream, else by the host's clock. post_fn() runs after each, unmeasured. AssertionError
    for less than two runs."""
    check(num_tests >= 2, f"bench: num_tests = {num_tests} (expected at least 2)")
    for _ in range(num_warmups):
        fn()
    has_gpu = torch.cuda.is_available()
    marks = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        begin = _mark(has_gpu)
        fn()
        marks.append((begin, _mark(has_gpu)))
        if post_fn is not None:
            post_fn()
    if has_gpu:
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in marks[1:]]
    else:
        times = [end - begin for begin, end in marks[1:]]
    return sum(times) / len(times), min(times), max(times)


def _mark(has_gpu: bool) -> Any:
    if not has_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def parse_num_bytes(text: str) -> int:
    """Parses bytes with a unit, like 1G, 64M or 512KiB, powers of 1024; ValueError unless
    positive."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    size = int(float(found[1]) * (1 << _UNITS[found[2]])) if found else 0
    if size <= 0:
        raise ValueError(f"{text!r} is no positive number of bytes (like 1G, 64M, 512K or 4096)")
    return size
