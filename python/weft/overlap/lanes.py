# SPDX-License-Identifier: Apache-2.0
"""The two lanes of a schedule: the caller's stream computes, one more stream exchanges tokens.

Without CUDA both lanes are the calling thread: work runs where it is issued, in that order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class HostLane:
    """Stands for a stream where there is none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"HostLane({self.name!r})"


class HostEvent:
    """Stands for a CUDA event: what was issued on the host is done."""

    def record(self, stream: Any = None) -> None:
        del stream

    def wait(self, stream: Any = None) -> None:
        del stream


_HOST_COMP = HostLane("comp")
_comm_stream: Any = None


def set_streams(comm_stream: Any = None, high_priority: bool = False) -> None:
    """Makes the communication stream of this process, once; later calls change nothing.

    comm_stream: a torch.cuda.Stream to use. Else one is made, of the highest priority there is
    with `high_priority`, so that its kernels get free SMs first.
    """
    global _comm_stream
    if _comm_stream is not None:
        return
    if comm_stream is None:
        comm_stream = _new_stream(high_priority)
    _comm_stream = comm_stream


def _new_stream(high_priority: bool) -> Any:
    if not torch.cuda.is_available():
        return HostLane("comm")
    # CUDA streams have priorities from 0 down; torch clamps to the lowest number there is.
    return torch.cuda.Stream(priority=-5 if high_priority else 0)


def get_comm_stream() -> Any:
    """The stream of `set_streams`; made with its defaults if there is none yet."""
    set_streams()
    return _comm_stream


def get_comp_stream() -> Any:
    """torch's current stream."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else _HOST_COMP


def lane_of(stream: Any) -> str:
    """ "comm" or "comp"."""
    return "comm" if stream == get_comm_stream() else "comp"


def new_event() -> Any:
    """What one micro-batch's nodes wait for and move on."""
    return torch.cuda.Event() if torch.cuda.is_available() else HostEvent()


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Has `stream` as torch's current stream."""
    return nullcontext() if isinstance(stream, HostLane) else torch.cuda.stream(stream)


def known_to(tensors: Any, stream: Any) -> None:
    """Tells the allocator that `stream` uses these, whichever stream they were made on."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)


def join_lanes() -> None:
    """The current stream waits for all that the communication stream was given."""
    comm = get_comm_stream()
    if not isinstance(comm, HostLane):
        torch.cuda.current_stream().wait_stream(comm)
