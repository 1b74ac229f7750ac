# SPDX-License-Identifier: Apache-2.0
"""Record of the ranks that have come to a collective of a process group, to name an absent rank
when time is up. group.py asks before each torch collective, which would wait for half an hour."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

import torch.distributed as dist

from weft.errors import PeerError, TimeoutError

TIMEOUT = 100.0  # seconds that a rank is waited for where no caller says how many
LEAST = 5.0  # seconds, however few are said: set-up itself takes a while
_SHORT, _LONG = 5e-4, 0.05  # growing seconds between two looks at the store

_timeout = contextvars.ContextVar("timeout", default=TIMEOUT)


@contextlib.contextmanager
def within(seconds: object) -> Iterator[None]:
    """Limits collectives inside to `seconds` of waiting for a rank, at least `LEAST`; `TIMEOUT` if
    it is no number."""
    is_given = isinstance(seconds, int | float) and seconds > 0
    before = _timeout.set(max(float(seconds), LEAST) if is_given else TIMEOUT)
    try:
        yield
    finally:
        _timeout.reset(before)


class Arrivals:
    """Record in a process group's store of the ranks that have come; must not keep the store alive.
    A round ends with the same word for all: that all are there, or why no rank waits any
    longer."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._round = 0

    def await_all(self, process_group: dist.ProcessGroup) -> None:
        """Collective. Raises TimeoutError that names late ranks, on them too when they come;
        PeerError where the store is gone with the rank that holds it."""
        _, store = dist.distributed_c10d._world.pg_map.get(process_group, (None, None))
        if store is None or self._num_ranks == 1:  # torch keeps none of some
            return
        try:
            word = self._meet(dist.PrefixStore("weft/arrivals", store))
        except dist.DistError as error:
            text = f"group: the store of the process group is gone ({error})"
            raise PeerError(text, "peer failed", self._rank) from error
        if word != _ALL:
            raise TimeoutError(f"group: {word}", "timeout", self._rank)

    def _meet(self, store: dist.Store) -> str:
        self._round += 1
        name = f"round {self._round}"

        def end(word: str) -> str:
            """Returns any rank's first word."""
            return store.compare_set(name, "", word).decode()

        def is_late(rank: int) -> bool:
            key = f"rank {rank}"
            return not store.check([key]) or int(store.get(key)) < self._round

        store.set(f"rank {self._rank}", str(self._round))
        if store.add(f"{name}: arrived", 1) == self._num_ranks:
            for old in (f"round {self._round - 1}", f"round {self._round - 1}: arrived"):
                store.delete_key(old)  # all have read it
            return end(_ALL)
        seconds = _timeout.get()
        deadline, pause = time.monotonic() + seconds, _SHORT
        while not store.check([name]):
            if time.monotonic() > deadline:
                late = list(filter(is_late, range(self._num_ranks)))
                return end(
                    f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not come "
                    f"within {seconds:g} s (all ranks make and close exchanges in the same order)",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONG)
        return store.get(name).decode()


_ALL = "all are here"
