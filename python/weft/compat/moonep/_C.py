# SPDX-License-Identifier: Apache-2.0
"""What programs ask MoonEP's extension before they make a buffer; its memory is not here."""

__all__ = ["nvl_multicast_supported"]


def nvl_multicast_supported() -> bool:
    """True: whoever asks wants to know whether a `Buffer` works here, and Weft's needs no
    multicast."""
    return True
