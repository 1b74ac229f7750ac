# SPDX-License-Identifier: Apache-2.0
"""Part of MoonEP's extension that programs ask before they make a buffer; it has no memory here."""

__all__ = ["nvl_multicast_supported"]


def nvl_multicast_supported() -> bool:
    """Returns True: callers ask whether a `Buffer` works here, and Weft's needs no multicast."""
    return True
