# SPDX-License-Identifier: Apache-2.0
"""Dispatches of a recomputation that take the layout of the forward before it.

Activation checkpointing runs a layer again in its backward. The routing is the same, so the handle
of the first dispatch serves the second, which then exchanges no layout. A recorder belongs to one
checkpointed call; rows travel again, and only handles and what is small are kept.

    recorder = DispatchReplayRecorder()
    with dispatch_replay_scope(recorder, "record"):
        out = layer(x)
    recorder.rewind()
    with dispatch_replay_scope(recorder, "replay"):
        out = layer(x)

The names are NeMo Automodel's. "hybridep" has a recorder and a scope of its own.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Recorder:
    """Records that the dispatches of a forward left, in their order."""

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._cursor = 0
        self.replay_misses = 0  # dispatches of the recomputation that the forward did not have

    def take(self) -> Any:
        """The next record; None past the last, where the caller makes a full dispatch."""
        if self._cursor >= len(self._records):
            self.replay_misses += 1
            return None
        self._cursor += 1
        return self._records[self._cursor - 1]

    def rewind(self) -> None:
        """The first record is the next one again."""
        self._cursor = 0


class DispatchReplayRecorder(_Recorder):
    """For `fused_dispatch`."""

    def record(self, entry: Any) -> None:
        """entry: (handle, local experts, probabilities, tokens per expert)."""
        self._records.append(entry)


class HybridEPDispatchReplayRecorder(_Recorder):
    """For `hybrid_ep_dispatch`. Its records are [handle, tokens per expert, their sum or None]."""

    def record(self, handle: Any, tokens_per_expert: Any) -> None:
        self._records.append([handle, tokens_per_expert, None])

    def finalize(self) -> None:
        """Sums up the counts of each record, once; waits for a GPU that has them.

        Buffers of Weft know their number of rows without it. Others may want it.
        """
        for entry in self._records:
            if entry[2] is None:
                entry[2] = int(entry[1].sum())


class Binding(threading.local):
    """The recorder of this thread's innermost scope, and what the scope does with it."""

    def __init__(self) -> None:
        self.recorder: Any = None
        self.mode: str | None = None

    def take(self) -> Any:
        """The record to dispatch by, None for a full dispatch."""
        return self.recorder.take() if self.mode == "replay" else None

    def record(self, *entry: Any) -> None:
        """Keeps what a full dispatch has left, if that is wanted."""
        if self.mode == "record":
            self.recorder.record(*entry)

    @contextlib.contextmanager
    def bound(self, recorder: Any, mode: str) -> Iterator[None]:
        before = self.recorder, self.mode
        self.recorder, self.mode = recorder, None if recorder is None else mode
        try:
            yield
        finally:
            self.recorder, self.mode = before


_dispatch_replay_state = Binding()
_hybridep_dispatch_replay_state = Binding()


def dispatch_replay_scope(
    recorder: DispatchReplayRecorder | None, mode: str
) -> contextlib.AbstractContextManager[None]:
    """A context in which `fused_dispatch` fills the recorder (mode "record") or dispatches by its
    records ("replay"). For this thread only; scopes may be nested, and None ends the outer one's
    work inside."""
    return _dispatch_replay_state.bound(recorder, mode)


def hybridep_dispatch_replay_scope(
    recorder: HybridEPDispatchReplayRecorder | None, mode: str
) -> contextlib.AbstractContextManager[None]:
    """`dispatch_replay_scope` for `hybrid_ep_dispatch`. Raises ValueError for another mode."""
    if mode not in ("record", "replay"):
        raise ValueError(f"Unsupported HybridEP dispatch replay mode: {mode}")
    return _hybridep_dispatch_replay_state.bound(recorder, mode)


def _replay_mode() -> str | None:
    return _dispatch_replay_state.mode


def _active_recorder() -> DispatchReplayRecorder | None:
    return _dispatch_replay_state.recorder
