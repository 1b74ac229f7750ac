# SPDX-License-Identifier: Apache-2.0
"""How the programs here end their process group."""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

PATIENCE = 0.2  # seconds


def leave() -> None:
    """Of the default process group, and long enough before the interpreter ends.

    A thread of gloo lets go of the last collective's tensors after whoever waited for it goes on,
    and needs the interpreter for that: without it the thread aborts the process.
    """
    dist.destroy_process_group()
    gc.collect()
    time.sleep(PATIENCE)
