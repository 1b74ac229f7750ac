# SPDX-License-Identifier: Apache-2.0
"""Keeps one buffer for each family and group of ranks.

The one used last is in the family's state variable in `weft.fused_a2a`; those of other groups are
parked. So layers on different groups can take turns without building buffers, and without
destroying one, which its whole group may have to do together.
"""

import atexit
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from weft import fused_a2a as state

_STATE = ("_buffer", "_uccl_buffer", "_hybrid_ep_buffer", "_elastic_buffer")

lock = threading.RLock()  # forward and backward run on different threads
parked: dict[str, list[Any]] = {}  # by the name of the state variable


def get(name: str, group: Any, is_enough: Callable[[Any], bool], build: Callable) -> Any:
    """The buffer of `group`, made the current one.

    `build(None)` makes it; `build(old)` replaces one that is not enough. Every rank of the group
    must ask for the same sizes, since both are collective.
    """
    with lock:
        buffer = take(name, group)
        if buffer is None:
            buffer = build(None)
        elif not is_enough(buffer):
            if getattr(buffer, "explicitly_destroy", False):
                destroy(buffer)
            buffer = build(buffer)
        setattr(state, name, buffer)
        return buffer


def take(name: str, group: Any) -> Any:
    """Takes the buffer of `group` out of the cache, None if there is none; then none is current."""
    with lock:
        found, others = None, []
        for buffer in take_all(name):
            theirs = getattr(buffer, "group", group)  # a stand-in without a group serves any
            if found is None and is_same_group(theirs, group):
                found = buffer
            elif members(theirs) is not None:
                others.append(buffer)  # the rest is of groups that torch has destroyed
        parked[name] = others
        return found


def take_all(name: str) -> list[Any]:
    """Empties the cache of a family and returns what was in it, the current buffer first."""
    with lock:
        current = getattr(state, name)
        setattr(state, name, None)
        return ([] if current is None else [current]) + parked.pop(name, [])


@atexit.register
def _forget() -> None:
    """Buffers hold process groups, whose threads end with them.

    A thread that outlives the interpreter and lets go of a tensor then aborts the process.
    """
    for name in _STATE:
        take_all(name)


def is_same_group(one: Any, other: Any) -> bool:
    """Whether two process groups have the same ranks in the same order."""
    if one is other:
        return True
    ranks = members(one)
    return ranks is not None and ranks == members(other)


def members(group: Any) -> list[int] | None:
    """The ranks of a process group in its order; None if torch does not know it (any more)."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError, AttributeError):
        return None


def destroy(buffer: Any) -> None:
    """Its errors are swallowed: nothing can be done about a buffer that is given up."""
    with contextlib.suppress(Exception):
        buffer.destroy()
