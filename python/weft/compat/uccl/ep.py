# SPDX-License-Identifier: Apache-2.0
"""The names of the `uccl.ep` extension.

`Buffer` is the class that programs call, not the raw one beneath UCCL's own wrapper.
Proxies, threads that post network commands for a GPU, do not exist in Weft: there are none to
count or register, and making one raises `weft.Unsupported`.
"""

from typing import Any

from weft.compat.deep_ep import Config, EventOverlap, get_low_latency_rdma_size_hint
from weft.compat.deep_ep.checks import NotInWeft

from . import Buffer, EventHandle, __version__

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "Proxy",
    "__version__",
    "get_low_latency_rdma_size_hint",
    "get_num_proxy_threads",
    "is_sm90_compiled",
    "register_proxies",
    "unregister_proxy",
]

is_sm90_compiled = Buffer.is_sm90_compiled


class Proxy:
    """Raises Unsupported when made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise NotInWeft(
            "Proxy: Weft has no proxies (use weft.compat.uccl.UCCLBuffer instead of a wrapper "
            "around UCCL's raw runtime)"
        )


def get_num_proxy_threads() -> int:
    """Is 0."""
    return 0


def register_proxies(device_index: int, proxies: list[Proxy]) -> None:
    """Does nothing: there is no `Proxy`."""


def unregister_proxy(device_index: int) -> None:
    """Does nothing: no `Proxy` exists."""
