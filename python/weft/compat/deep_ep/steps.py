# SPDX-License-Identifier: Apache-2.0
"""How ranks on GPUs get in step again after a loss, where callers repeat no call.

On one host calls are mostly repeated in place in their streams (`on_peer_loss="repeat"` of
`Exchange`), with nothing to do here. Otherwise an exchange raises `RanksLost` on all ranks that are
left, which may have come to different calls by then, and goes on from the same number on all.
Callers of masks expect calls to return instead: empty if a rank is lost meanwhile, and then among
the rest. So a rank behind the furthest leaves out as many of its next calls as it was behind
(`CallReport.calls_behind`), and no rank calls by an earlier plan. A call that is left out returns
what a call without rows returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from weft import CallReport, Exchange, Plan
from weft.errors import RanksLost
from weft.outputs import SkippedPlan

_Made = TypeVar("_Made", bound=tuple)
_Brought = TypeVar("_Brought")


class Steps:
    """Counts of one exchange on this rank: losses of ranks, and calls yet to be left out."""

    def __init__(self) -> None:
        self.era = 0  # how often ranks were lost
        self._left: list[tuple[int, int]] = []  # era, calls of it that are still to be left out
        self.are_replayed = False  # calls were captured

    @staticmethod
    def of(exchange: Exchange) -> Steps:
        found = _STEPS.get(exchange)
        return Steps().are_of(exchange) if found is None else found

    def are_of(self, exchange: Exchange) -> Steps:
        _STEPS[exchange] = self
        return self

    def hear(self, report: CallReport) -> None:
        """Records a loss that all ranks left know of."""
        if report.is_repeated:
            return
        if report.calls_behind > 0:
            self._left.append((self.era, report.calls_behind))
        self.era += 1

    def has(self, plan: Plan | SkippedPlan) -> bool:
        """Returns whether calls can be made by the plan: no rank was lost since."""
        return plan.era == self.era and plan.core is not None

    @property
    def behind(self) -> int:
        """Calls that are still to be left out."""
        return sum(left for _, left in self._left)

    def _leave_out(self, num_calls: int) -> int:
        """Takes num_calls off the calls that `behind` counts. Returns their era."""
        era, left = self._left.pop(0)
        if left > num_calls:
            self._left.insert(0, (era, left - num_calls))
        return era

    def dispatch(self, call: Callable[[bool], _Made]) -> _Made:
        """Collective. Returns call(is_skipped), which plans and dispatches, or skips both as
        `Exchange.plan_and_dispatch` explains; its first result is the plan."""
        is_capturing = _is_capturing()
        self.are_replayed |= is_capturing
        while True:
            if self._left and not is_capturing:  # captured calls run later
                made = call(True)
                made[0].era = self._leave_out(made[0].num_calls)
                return made
            try:
                made = call(False)
            except RanksLost:
                continue
            made[0].era = self.era
            return made

    def combine(
        self,
        plan: Plan | SkippedPlan,
        call: Callable[[], _Brought],
        skipped: Callable[[], _Brought],
    ) -> _Brought:
        """Collective. Returns call(), a combine by the plan, or skipped()."""
        while self.has(plan):
            try:
                return call()
            except RanksLost:
                continue
        # The furthest rank made those calls by plans of that era.
        if self._left and self._left[0][0] == plan.era:
            self._leave_out(1)
        return skipped()

    def look(self, exchange: Exchange) -> None:
        """Hears of losses, and then waits for the ranks that are left. Local, on all of these, at
        any point between calls or replays; calls that were sent are received."""
        # Losses in queued work are heard, too; and a queued replay would count as a call of the
        # ranks that are left.
        if self.are_replayed or not exchange.is_between_gpu_domains:
            torch.cuda.current_stream(exchange.device).synchronize()
        while True:
            try:
                exchange.check()
                return
            except RanksLost:
                # A replay cannot be left out. Graphs hold whole steps, and from here on all ranks
                # begin a step.
                if self.are_replayed:
                    self._left.clear()


_STEPS: weakref.WeakKeyDictionary[Exchange, Steps] = weakref.WeakKeyDictionary()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
