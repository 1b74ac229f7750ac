# SPDX-License-Identifier: Apache-2.0
"""How the compatibility modules refuse a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from weft.errors import BadCall, Error


def check(is_good: object, problem: str) -> None:
    """Raises `BadCall` with `problem` unless `is_good`."""
    if not is_good:
        raise BadCall(problem)


@contextlib.contextmanager
def refused_by_all(refuse: Callable[[], Any]) -> Iterator[None]:
    """For checks that may fail on one rank alone: the others shall raise too, and not wait for it.

    refuse: a collective call, the one that the other ranks are in, with arguments that it refuses.
    """
    try:
        yield
    except BadCall:
        with contextlib.suppress(Error):  # the reason is in the error that goes on
            refuse()
        raise
