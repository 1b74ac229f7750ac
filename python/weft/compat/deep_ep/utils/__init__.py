# SPDX-License-Identifier: Apache-2.0
"""Names that callers import from `deep_ep.utils` and below. Exchanges need only event.py."""

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
