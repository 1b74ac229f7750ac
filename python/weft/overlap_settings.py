# SPDX-License-Identifier: Apache-2.0
"""Settings of exchanges on a GPU that computes at the same time, where the caller did not choose:
their multiprocessors, and whether copy engines carry their rows. The core has the rules."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft import _core

# SMs of the GPU that computes, 0 without one; None: exchanges run beside nothing.
gpu_sms: int | None = None


@contextmanager
def overlapped() -> Iterator[None]:
    """Makes exchanges within, in all threads (backward's too), leave room for other kernels."""
    global gpu_sms
    before, gpu_sms = gpu_sms, count_gpu_sms()
    try:
        yield
    finally:
        gpu_sms = before


def sms(is_copied_dispatch: bool = False) -> int:
    """Returns a call's SMs for num_sms = 0; 0: by Weft's table for exchanges that run alone."""
    return _core.overlapped_sms(gpu_sms, is_copied_dispatch) if gpu_sms else 0


def copies(hidden: int, num_ranks: int) -> bool:
    """Returns whether a call goes by copy engines. WEFT_COPY_ENGINES is auto, never or always.

    Raises InvalidArgument (a ValueError) for another value.
    """
    return gpu_sms is not None and _copies(hidden, num_ranks)


_copies = functools.cache(_core.overlapped_copies)


def count_gpu_sms() -> int:
    """Returns the multiprocessors of the current GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
