# SPDX-License-Identifier: Apache-2.0
"""Events of `uccl.ep`: those of `deep_ep`, on any stream."""

from __future__ import annotations

import torch

from weft.compat.deep_ep.events import EventHandle as CurrentStreamEvent
from weft.compat.deep_ep.events import EventOverlap

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle(CurrentStreamEvent):
    """A point on torch's current CUDA stream, or on the stream with this handle (a number)."""

    def __init__(self, stream: int | None = None) -> None:
        super().__init__()
        if stream is not None and self._event is not None:
            self._event = torch.cuda.ExternalStream(stream).record_event()
