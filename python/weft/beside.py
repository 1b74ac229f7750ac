# SPDX-License-Identifier: Apache-2.0
"""GPU multiprocessors of exchanges that run beside computation, where nobody chose their number.

An exchange that has the GPU to itself is fastest with all of them; beside products of matrices it
would then wait until it gets them, and the products for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# By the name of a GPU: what suffices for an exchange in case B to be as fast as with half as many
# more (docs/overlap.md).
_MEASURED = {"NVIDIA H200": 32}
_SHARE = 8 / 33  # of another GPU: the same part

_usual = 0


def usual_sms() -> int:
    """What a call takes for num_sms = 0; 0: Weft's table for exchanges that run alone."""
    return _usual


@contextmanager
def beside_computation() -> Iterator[None]:
    """Within it, in all threads (backward has its own): exchanges leave room for other kernels."""
    global _usual
    before = _usual
    _usual = sms_beside_computation()
    try:
        yield
    finally:
        _usual = before


def sms_beside_computation() -> int:
    """For the current GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return _sms_of(torch.cuda.current_device())


@functools.cache
def _sms_of(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    return _MEASURED.get(properties.name, max(2, int(_SHARE * count) // 2 * 2))
