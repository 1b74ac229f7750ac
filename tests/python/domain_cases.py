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
    given = {"WEFT_RANKS_PER_DOMAIN": "2", "FI_OFI_RXM_BUFFER_SIZE": "1024"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield dist.new_group(list(range(NUM_RANKS)))
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
