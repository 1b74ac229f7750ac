# SPDX-License-Identifier: Apache-2.0
"""The ranks that a store of torch.distributed brings together, without a process group."""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from weft.errors import InvalidArgument, TimeoutError

_PATIENCE = 300  # seconds for all ranks to come, as callers of this interface are used to
_GOOD, _REFUSED = b"+", b"-"


class StoreRanks:
    """What `MpiGroup` of deep_ep asks of an mpi4py communicator, over a store.

    All ranks make as many of them on a store, in the same order.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._counter = f"weft/nixl_ep/{rank}"  # of those that this rank has made
        self._prefix = f"weft/nixl_ep/{store.add(self._counter, 1)}"
        self._round = 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._num_ranks

    def allgather(self, block: bytes) -> list[bytes]:
        """Collective: the blocks of all ranks, by rank."""
        self._tell(_GOOD + block)
        return self._hear("all_gather")

    def agreed(self, what: str, make: Callable[[], None], equal: str) -> None:
        """Collective: make(). If it raises on a rank, all others raise InvalidArgument; so do all
        if `equal`, some settings in words, is not. A rank that raises waits for nobody."""
        try:
            make()
        except Exception as error:
            self._tell(_REFUSED + (str(error) or "?").encode())
            raise
        self._tell(_GOOD + equal.encode())
        self._hear(what, equal.encode())

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _tell(self, block: bytes) -> None:
        self._round += 1
        self._store.set(self._key(self._round, self._rank), block)

    def _hear(self, what: str, wanted: bytes | None = None) -> list[bytes]:
        """wanted: what all ranks must have told."""
        keys = [self._key(self._round, rank) for rank in range(self._num_ranks)]
        deadline, blocks = time.monotonic() + _PATIENCE, []
        for rank, key in enumerate(keys):  # one by one: there may be fewer than this rank expects
            try:
                left = max(deadline - time.monotonic(), 0.001)
                self._store.wait([key], timedelta(seconds=left))
            except Exception as error:
                self._store.add(self._counter, -1)  # the next one meets those that come late
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(
                    f"{what}: rank {self._rank} waited {_PATIENCE} s in the store for ranks "
                    f"{missing} of {self._num_ranks}",
                    "timeout",
                    self._rank,
                ) from error
            block = self._store.get(key)
            if block[:1] == _REFUSED:
                reason = f"{what}: rank {rank} refused the call: {block[1:].decode()}"
                raise InvalidArgument(reason, rank=self._rank)
            if wanted is not None and block[1:] != wanted:
                here = wanted.decode()
                reason = f"{what}: {block[1:].decode()} on rank {rank} and {here} on rank"
                equal = "(must be equal on all ranks)"
                raise InvalidArgument(f"{reason} {self._rank} {equal}", rank=self._rank)
            blocks.append(block)
        # Whoever has come here has read the round before; some stores cannot delete.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(self._key(self._round - 1, self._rank))
        return [block[1:] for block in blocks]
