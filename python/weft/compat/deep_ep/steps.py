# SPDX-License-Identifier: Apache-2.0
"""How ranks on GPUs get in step again after a loss, where callers make no call again.

On one host calls are mostly made again where they lie in their streams (`on_peer_loss="repeat"` of
`Exchange`), and there is nothing to do here. Where that cannot be, an exchange raises `RanksLost`
on all ranks that are left, which may have come to different calls by then, and goes on from one
number on all of them. Callers of masks expect calls that return instead: those during which a rank
is lost, with nothing, and then those among the rest. So a rank that was behind the furthest leaves
out as many of its next calls as it was behind (`CallReport.calls_behind`), and no rank calls by a
plan of before. What is left out returns what a call returns to which no row has come.
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
    """Counts of one exchange on this rank: losses of ranks, and calls that are to be left out."""

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
        """Ranks are lost, and all that are left know it."""
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
        """Collective. call(is_skipped), which makes a plan and dispatches by it, or as
        `Exchange.plan_and_dispatch` explains does not; the plan is the first of what it returns."""
        is_capturing = _is_capturing()
        self.are_replayed |= is_capturing
        while True:
            if self._left and not is_capturing:  # what is captured is made later
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
        """Collective. call(), which combines by the plan, or skipped()."""
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
        """Local, of all ranks that are left, between the same two calls or replays or at others:
        hears of losses if there are any, for which it waits for these ranks. Calls that were sent
        are received."""
        # Losses of what is queued are heard, too; and a replay that is would count as a call of
        # those that are left.
        if self.are_replayed or not exchange.is_between_gpu_domains:
            torch.cuda.current_stream(exchange.device).synchronize()
        while True:
            try:
                exchange.check()
                return
            except RanksLost:
                # No host can leave a replay out. Graphs are of whole steps, and from here on all
                # begin one.
                if self.are_replayed:
                    self._left.clear()


_STEPS: weakref.WeakKeyDictionary[Exchange, Steps] = weakref.WeakKeyDictionary()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
