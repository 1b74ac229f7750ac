# SPDX-License-Identifier: Apache-2.0
"""How exchanges run beside computation, where nobody chose: their GPU multiprocessors, and whether
copy engines carry their rows.

An exchange that has the GPU to itself is fastest with all multiprocessors; beside products of
matrices it would then wait until it gets them, and the products for it. Copy engines take none, but
rows must be packed before and stored after.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# By the name of a GPU (docs/overlap.md): what suffices for an exchange in case B to be as fast as
# with half as many more, and with what a dispatch by copy engines costs little.
_MEASURED = {"NVIDIA H200": (32, 64)}
_SHARES = (8 / 33, 16 / 33)  # of another GPU: the same parts

# From so many elements of a token on, copy engines cost computation less (docs/overlap.md). Their
# room grows with the ranks; of more they are not chosen.
_COPIED_HIDDEN, _COPIED_RANKS = 2048, 8
_CHOICES = ("auto", "never", "always")

_usual = (0, 0)
_is_beside = False


def usual_sms(is_copied_dispatch: bool = False) -> int:
    """What a call takes for num_sms = 0; 0: Weft's table for exchanges that run alone."""
    return _usual[is_copied_dispatch]


def usual_copies(hidden: int, num_ranks: int) -> bool:
    """Whether a call goes by copy engines. WEFT_COPY_ENGINES is auto, never or always.

    Raises ValueError for another value.
    """
    return _is_beside and _copies(hidden, num_ranks)


@functools.cache
def _copies(hidden: int, num_ranks: int) -> bool:
    choice = os.environ.get("WEFT_COPY_ENGINES") or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"WEFT_COPY_ENGINES = {choice} (expected one of {', '.join(_CHOICES)})")
    is_better = hidden >= _COPIED_HIDDEN and num_ranks <= _COPIED_RANKS
    return choice == "always" or (choice == "auto" and is_better)


@contextmanager
def beside_computation() -> Iterator[None]:
    """Within it, in all threads (backward has its own): exchanges leave room for other kernels."""
    global _usual, _is_beside
    before = _usual, _is_beside
    _usual, _is_beside = sms_beside_computation(), True
    try:
        yield
    finally:
        _usual, _is_beside = before


def sms_beside_computation() -> tuple[int, int]:
    """For the current GPU: of calls, and of a dispatch by copy engines. 0 without one."""
    if not torch.cuda.is_available():
        return 0, 0
    return _sms_of(torch.cuda.current_device())


@functools.cache
def _sms_of(device: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    usual, copied = (max(2, int(share * count) // 2 * 2) for share in _SHARES)
    return _MEASURED.get(properties.name, (usual, copied))
