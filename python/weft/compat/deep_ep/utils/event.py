# SPDX-License-Identifier: Apache-2.0
"""Events as `deep_ep` hands them out. Without a GPU a wait returns at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from weft.streams import StreamCall

from ..checks import check

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point on torch's current CUDA stream, taken when the handle is made."""

    def __init__(self) -> None:
        # Without CUDA initialised nothing runs on a stream, so there is nothing to wait for.
        is_cuda = torch.cuda.is_initialized()
        self._event = torch.cuda.current_stream().record_event() if is_cuda else None

    @classmethod
    def of(cls, event: torch.cuda.Event | None) -> EventHandle:
        """Wraps an event recorded already; None: nothing to wait for."""
        handle = cls.__new__(cls)
        handle._event = event
        return handle

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, and code to run beside the work before it: `with event: ...` waits at the end.

    event: an `EventHandle`, or None when there is nothing to wait for. extra_tensors: kept alive
    as long as this object.
    """

    hook_after_wait: Callable[[], Any] | None = None
    _release_handle = False

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: Iterable[torch.Tensor] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait for the event (AssertionError if None).

        Then runs a registered hook, once, and returns its result. release_handle: drops the event
        and the tensors.
        """
        check(
            self.event is not None, "current_stream_wait: event is None (there is none to wait for)"
        )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        value = None if hook is None else hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None
        return value

    def wait(self) -> Any:
        """`current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Has `hook()` run after the next wait. AssertionError if there is a hook."""
        check(
            self.hook_after_wait is None,
            "A hook is already registered on this `EventOverlap` (only one at a time)",
        )
        self.hook_after_wait = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Has `with event(release_handle=True): ...` drop the event after the wait."""
        self._release_handle = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_error: Any) -> None:
        release_handle, self._release_handle = self._release_handle, False
        if self.event is not None:
            self.current_stream_wait(release_handle)


def event_of(call: StreamCall) -> EventOverlap:
    """Makes the event that a call returns: with async_finish the call's, else an empty one."""
    return EventOverlap(EventHandle.of(call.event) if call.async_finish else None)
