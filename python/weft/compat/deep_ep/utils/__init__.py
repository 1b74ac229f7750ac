# SPDX-License-Identifier: Apache-2.0
"""What callers import from `deep_ep.utils` and the modules below it. The exchanges need event.py
only."""

from . import envs, event, math, semantic, testing
from .envs import check_nvlink_connections
from .event import EventHandle, EventOverlap

__all__ = [
    "EventHandle",
    "EventOverlap",
    "check_nvlink_connections",
    "envs",
    "event",
    "math",
    "semantic",
    "testing",
]
