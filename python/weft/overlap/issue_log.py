# SPDX-License-Identifier: Apache-2.0
"""What a schedule issued, in order. For tests, and for whoever wants to see a schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a node, e.g. m0.L1.mlp.fwd on "comp"."""

    chunk: str  # the plan's name
    node: str  # "L1.mlp", "pre_process", ...; "pre_forward" and the other hooks
    what: str  # "fwd", "bwd", "backward_dw"; "" for a hook
    lane: str  # "comp", "comm"

    def __str__(self) -> str:
        lane = " [comm]" if self.lane == "comm" else ""
        return ".".join(part for part in self[:3] if part) + lane


_open_logs: list[list[Step]] = []


@contextmanager
def record_issue_order() -> Iterator[list[Step]]:
    """The list that every step of this process goes to while the context is open.

    A step is there from the moment it begins, also if it then throws. Nodes that do nothing are
    not.
    """
    log: list[Step] = []
    _open_logs.append(log)
    try:
        yield log
    finally:
        _open_logs.remove(log)


def note(step: Step) -> None:
    for log in _open_logs:
        log.append(step)
