# SPDX-License-Identifier: Apache-2.0
"""The two lanes of a schedule: the caller's stream computes, one more stream exchanges tokens.
nodes.py runs on them. `record_issue_order` lists what a schedule issued on which lane.

Without CUDA both are torch.cpu's streams: work runs where it is issued, in that order.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from weft.streams import known_to as known_to

_comm_stream: Any = None


def set_streams(comm_stream: Any = None, high_priority: bool = False) -> None:
    """Makes the communication stream of this process, once; later calls change nothing.

    comm_stream: a torch.cuda.Stream to use. Else one is made, of the highest priority there is
    with `high_priority`, so that its kernels get free SMs first.
    """
    global _comm_stream
    if _comm_stream is None:
        # CUDA streams have priorities from 0 down; torch clamps to the lowest number there is.
        _comm_stream = comm_stream or _device().Stream(priority=-5 if high_priority else 0)


def _device() -> Any:
    """Picks torch.cuda, or torch.cpu, whose streams do nothing."""
    return torch.cuda if torch.cuda.is_available() else torch.cpu


def get_comm_stream() -> Any:
    """Returns the stream of `set_streams`, made with its defaults if needed."""
    set_streams()
    return _comm_stream


def get_comp_stream() -> Any:
    """Gets the current stream."""
    return _device().current_stream()


def lane_of(stream: Any) -> str:
    """ "comm" or "comp"."""
    return "comm" if stream == get_comm_stream() else "comp"


def new_event() -> Any:
    """Makes the event that a micro-batch's nodes wait for and record."""
    return _device().Event()


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Makes `stream` torch's current stream."""
    return _device().stream(stream)


def join_lanes() -> None:
    """Makes the current stream wait for all work of the communication stream."""
    get_comp_stream().wait_stream(get_comm_stream())


class Step(NamedTuple):
    """One step of a node, e.g. m0.L1.mlp.fwd on "comp"."""

    chunk: str  # the plan's name
    node: str  # "L1.mlp", "pre_process", ...; "pre_forward" and the other hooks
    what: str  # "fwd", "bwd", "backward_dw"; "" for a hook
    lane: str  # "comp", "comm"

    def __str__(self) -> str:
        lane = " [comm]" if self.lane == "comm" else ""
        return ".".join(part for part in self[:3] if part) + lane


_open_logs: list[list[Step]] = []


@contextmanager
def record_issue_order() -> Iterator[list[Step]]:
    """Yields a list that gets every step of this process while the context is open.

    A step is listed when it begins, also if it then throws. Nodes that do nothing are not listed.
    """
    log: list[Step] = []
    _open_logs.append(log)
    try:
        yield log
    finally:
        _open_logs.remove(log)


def note(step: Step) -> None:
    for log in _open_logs:
        log.append(step)
