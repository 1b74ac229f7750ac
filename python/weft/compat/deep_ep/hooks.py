# SPDX-License-Identifier: Apache-2.0
"""Receive hooks of low-latency calls, and what becomes of those that nobody calls.

In `deep_ep` the results of a call lie in one of two places that the calls of a buffer take in
turns: with the next call but one they are gone, and a receive that nobody has asked for by then
never happens. Weft's results stay, but a caller that forgets a hook reads them before they have
come. So the next call but one refuses, and a combine by the handle whose own rows have not come.
Two micro-batches that take turns meet neither.
"""

from __future__ import annotations

from collections.abc import Callable

from .checks import check


class Hook:
    """Called with nothing, as often as wanted: later work of the current stream comes after the
    call that returned it."""

    def __init__(self, name: str, wait: Callable[[], None]) -> None:
        """name: of the call. wait: has the current stream wait for it."""
        self.name = name
        self.was_called = False
        self._wait = wait

    def __call__(self) -> None:
        self._wait()
        self.was_called = True


class LastHooks:
    """Those of a buffer's last two low-latency calls; None where a call has returned none."""

    def __init__(self) -> None:
        self._before: Hook | None = None
        self._last: Hook | None = None

    def check(self, own: Hook | None = None) -> None:
        """Before a call. own: of the dispatch that a combine belongs to. BadCall if one was not
        called; that of the call before the last is then forgotten, or its buffer could not go on
        where it is lost."""
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

    def add(self, hook: Hook | None) -> None:
        """After a call."""
        self._before, self._last = self._last, hook
