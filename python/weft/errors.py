# SPDX-License-Identifier: Apache-2.0
"""Errors that Weft raises. The text says what was asked, what is allowed, and which rank speaks."""

import contextlib


class Error(RuntimeError):
    """Base of Weft's errors. `code`: the kind; `rank`: who raises (-1 outside a group)."""

    def __init__(self, message: str, code: str = "internal", rank: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank


class InvalidArgument(Error, ValueError):
    """The caller's input is wrong; raised before any write."""

    def __init__(self, message: str, code: str = "invalid argument", rank: int = -1) -> None:
        super().__init__(message, code, rank)


class BadCall(InvalidArgument, AssertionError):
    """A caller's mistake in a call under another library's name, found before anything runs.

    Such libraries fail assertions or raise RuntimeError; this is both of those, and ValueError.
    """


class Unsupported(Error):
    """A legal request that this build or device cannot do."""


class NotAvailable(Error):
    """A library, device or permission is missing."""


class TimeoutError(Error, TimeoutError):  # noqa: A001  (also the built-in one)
    """A deadline passed; the message names who waited for whom."""


class PeerError(Error):
    """Another rank died or left."""


class RanksLost(PeerError):
    """On GPUs, with on_peer_loss="shrink": ranks are lost, and the exchange goes on without them.
    `exchange.report()` says which, and how many of this rank's last calls are to be made again."""


_BY_CODE = {
    "invalid argument": InvalidArgument,
    "unsupported": Unsupported,
    "not available": NotAvailable,
    "timeout": TimeoutError,
    "peer failed": PeerError,
    "ranks lost": RanksLost,
}


def reason_of(error: BaseException) -> str:
    """Returns what other ranks hear of the error: text that can be sent."""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)
    return (text or type(error).__name__).encode(errors="replace").decode()


def of_core(message: str, code: str, rank: int) -> Error:
    """Returns the error that the core threw."""
    return _BY_CODE.get(code, Error)(message, code, rank)
