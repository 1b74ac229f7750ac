# SPDX-License-Identifier: Apache-2.0
"""When work on a communication stream begins, and who waits for it.

    with stream.call(device, inputs, previous_event=..., async_finish=...) as call:
        out = ...                  # torch's current stream is the one of the work here
        call.returns(out)
    call.event                     # torch.cuda.Event, or None if the current stream waits already

The work begins after `previous_event`, or else after all that the current stream was given. Then
the current stream waits for it, or the caller does (`async_finish`). Without either, nothing can
happen beside the work, and it runs on the current stream itself, which saves the events. Else
outputs come from the communication stream's memory, and memory that was allocated on one stream and
is used on the other is known to both, so that it is not given away too early.

On CPU tensors nothing runs aside; the rules about arguments hold all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.errors import BadCall

# torch's default stream is CUDA's legacy one, whose handle is 1: 0 would stand for none.
LEGACY = 1


class CommStream:
    """The communication stream of one buffer: one for each device it meets, made when needed."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: torch.cuda.Stream | None = None  # that a call ran on
        self._last_raw: tuple[int, int] | None = None  # its device and handle

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the high-priority stream on a CUDA device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return self._streams[device]

    def call(
        self,
        device: torch.device,
        inputs: Iterable[Tensor | None] = (),
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> contextlib.AbstractContextManager[StreamCall]:
        """Returns the context for one call's work on tensors of `device`, to be entered at once.

        previous_event: anything with `current_stream_wait()`, or with an `event` that has it (None:
        no event). Replaces the wait for the current stream, so it must be newer than all that
        produces `inputs`. async_finish: the current stream does not wait.
        BadCall if allocate_on_comm_stream lacks previous_event or async_finish.
        """
        event = previous_event
        if event is not None:
            event = getattr(event, "event", event)
        if allocate_on_comm_stream and (event is None or not async_finish):
            raise BadCall(
                f"allocate_on_comm_stream: previous_event is {event}, async_finish is "
                f"{async_finish} (it needs an event and async_finish)"
            )
        call = StreamCall(async_finish)
        if device.type != "cuda":
            return call
        is_aside = event is not None or async_finish
        if not is_aside and self.is_current(device):
            return call  # the common case; making a torch stream takes microseconds
        caller = torch.cuda.current_stream(device)
        if not is_aside:
            self._follow(caller)
            return call
        return self._aside(call, caller, self.of(device), inputs, event)

    def is_current(self, device: torch.device) -> bool:
        """Returns whether the next call needs no wait on the device's current stream: the last call
        ran there."""
        return device.type != "cuda" or self._last_raw == _current_raw(device)

    def current(self, gpu: int) -> int | None:
        """Returns the current stream of a GPU (CPU: gpu -1, stream 0) as an exchange takes it; None
        if the next call would have to wait there for the last."""
        if gpu < 0:
            return 0
        raw = torch._C._cuda_getCurrentRawStream(gpu)
        return raw or LEGACY if self._last_raw == (gpu, raw) else None

    @contextlib.contextmanager
    def _aside(
        self,
        call: StreamCall,
        caller: torch.cuda.Stream,
        comm: torch.cuda.Stream,
        inputs: Iterable[Tensor | None],
        event: Any,
    ) -> Iterator[StreamCall]:
        """Runs `call`'s body on `comm`."""
        is_async = False  # an error is not
        try:
            with torch.cuda.stream(comm):
                if event is None:
                    comm.wait_stream(caller)
                else:
                    event.current_stream_wait()
                self._follow(comm)
                yield call
            is_async = call.async_finish
        finally:
            known_to(call.outputs, caller)
            if is_async:
                known_to(inputs, comm)
                call.event = comm.record_event()
            else:
                caller.wait_stream(comm)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Has the current stream wait for the call before, which may have run on another one: calls
        follow each other. A graph that is captured knows only its own calls."""
        last, self._last = self._last, stream
        self._last_raw = (stream.device_index, stream.cuda_stream)
        if last in (None, stream):
            return
        is_captured = torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(last):
            is_same_work = torch.cuda.is_current_stream_capturing() == is_captured
        if is_same_work:
            stream.wait_stream(last)


def stream_of(tensor: Tensor) -> int:
    """Returns the tensor's current GPU stream as a number; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def _current_raw(device: torch.device) -> tuple[int, int]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


class StreamCall:
    """One call on its stream, made by `CommStream.call`. As a context it does nothing: the call is
    on the current stream."""

    __slots__ = ("async_finish", "event", "outputs")

    def __init__(self, async_finish: bool) -> None:
        self.async_finish = async_finish
        self.event: torch.cuda.Event | None = None  # with async_finish, after the context
        self.outputs: tuple[Tensor | None, ...] = ()

    def __enter__(self) -> StreamCall:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def returns(self, *tensors: Tensor | None) -> None:
        """Says which tensors the caller will use on its own stream."""
        self.outputs += tensors  # of which there are few


def known_to(tensors: Iterable[Any], stream: Any) -> None:
    """Tells torch's allocator that `stream` uses the CUDA tensors among `tensors`."""
    for tensor in tensors:
        if hasattr(type(tensor), "record_stream") and tensor.is_cuda:
            tensor.record_stream(stream)
