# SPDX-License-Identifier: Apache-2.0
"""Ranks in two domains of two, as two hosts have them: on one machine by smaller domains."""

import contextlib
import os

import torch.distributed as dist

NUM_RANKS = 4
DOMAINS = [[0, 1], [2, 3]]


@contextlib.contextmanager
def two_domains():
    """Collective, of `NUM_RANKS` ranks. A process group of its own: Weft remembers what it found
    out about one."""
    os.environ["WEFT_RANKS_PER_DOMAIN"] = "2"
    try:
        yield dist.new_group(list(range(NUM_RANKS)))
    finally:
        del os.environ["WEFT_RANKS_PER_DOMAIN"]
