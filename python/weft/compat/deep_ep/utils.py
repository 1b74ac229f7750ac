# SPDX-License-Identifier: Apache-2.0
"""The names that callers import from `deep_ep.utils`."""

from .events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
