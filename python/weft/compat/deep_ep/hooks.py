# SPDX-License-Identifier: Apache-2.0
"""Receive hooks of low-latency calls, and the rules for hooks that are not called.

In `deep_ep` the results of a call lie in one of two places that the calls of a buffer take in
turns: the next call but one overwrites them, and a receive not asked for by then never happens.
Weft's results stay, but a caller that forgets a hook reads them before they have come. So the next
call but one refuses, and so does a combine by the handle whose rows have not come. Two
micro-batches that take turns see neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from weft import Plan
from weft.streams import CommStream

from .checks import check
from .utils.event import EventHandle


class Receive:
    """The second half of a call that has only sent: on GPUs a launch, which waits for the other
    ranks. Until then the call holds no multiprocessor."""

    def __init__(self, plan: Plan, waits: Tensor | None, stream: CommStream) -> None:
        """plan: the call's. waits: int64 [R] to which the waits for each rank are added, or None.
        stream: of the buffer."""
        self._plan, self._waits, self._stream = plan, waits, stream
        self._then: Callable[[], object] | None = None
        self._is_done = False
        self._event: EventHandle | None = None  # of what the next call has received

    def then(self, work: Callable[[], object]) -> None:
        """Sets work to follow `run`."""
        self._then = work

    def run(self) -> None:
        """Receives on the current stream, once."""
        if self._is_done:
            return
        exchange, waits = self._plan.exchange, self._waits
        added = (
            contextlib.nullcontext() if waits is None else exchange.waits_added(waits, self._plan)
        )
        with added:
            exchange.receive(self._plan)
        if self._then is not None:
            self._then()
        self._is_done = True

    def ahead(self) -> None:
        """Receives before the next call, on its stream, unless done."""
        if not self._is_done:
            self.run()
            self._event = EventHandle()

    def wait(self) -> None:
        """Makes the current stream wait for the receive."""
        if self._event is not None:
            self._event.current_stream_wait()
            return
        with self._stream.call(self._plan.exchange.device):
            self.run()


class Hook:
    """Makes the current stream wait for the call that returned the hook; may be called any number
    of times."""

    def __init__(
        self, name: str, wait: Callable[[], None], ahead: Callable[[], None] | None = None
    ) -> None:
        """name: of the call. wait: makes the current stream wait for the call. ahead: what the next
        call does first, if the hook was not called."""
        self.name = name
        self.was_called = False
        self.ahead = ahead
        self._wait = wait

    def __call__(self) -> None:
        self._wait()
        self.was_called = True


class LastHooks:
    """Hooks of a buffer's last two low-latency calls; None where a call has returned none."""

    def __init__(self) -> None:
        self._before: Hook | None = None
        self._last: Hook | None = None

    @property
    def are_over(self) -> bool:
        """True if there is nothing to `check` or to `receive`: all were called."""
        last, before = self._last, self._before
        return (last is None or last.was_called) and (before is None or before.was_called)

    def check(self, own: Hook | None = None) -> None:
        """Checks hooks before a call; BadCall if one was not called. own: the hook of a combine's
        dispatch. The hook of the call before the last is then forgotten, so that a buffer whose
        caller lost the hook can go on."""
        if own is not None:
            check(
                own.was_called,
                f"the receive hook of this handle's {own.name} was not called (expected before "
                "its combine)",
            )
        before = self._before
        if before is not None and not before.was_called:
            self._before = None
            check(
                False,
                f"the receive hook of the {before.name} before the last call was not called "
                "(expected before the next low-latency call but one: 2 results are held at a time)",
            )

    def receive(self) -> None:
        """Receives the last call, at the begin of the next, on its stream."""
        last = self._last
        if last is not None and last.ahead is not None:
            last.ahead()

    def add(self, hook: Hook | None) -> None:
        """Adds a call's."""
        self._before, self._last = self._last, hook
