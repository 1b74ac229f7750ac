# SPDX-License-Identifier: Apache-2.0
"""How some of the ranks meet: by a store of torch.distributed, without a process group, or within a
process group or a communicator of mpi4py."""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from weft import Group
from weft.compat.deep_ep.checks import NotInWeft
from weft.compat.deep_ep.runtime import MpiGroup
from weft.errors import InvalidArgument, TimeoutError

_PATIENCE = 300  # seconds for all ranks to come, as callers of this interface are used to
_GOOD, _REFUSED = b"+", b"-"


class Absent(TimeoutError):
    """`ranks` have not come to the store in time."""

    ranks: list[int]


class StoreRanks:
    """What `MpiGroup` of deep_ep asks of an mpi4py communicator, over a store.

    All of the ranks make as many of them for a purpose, in the same order.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], purpose: str) -> None:
        """ranks: those that meet, ascending."""
        self._store, self._rank, self._ranks = store, rank, ranks
        name = f"weft/nixl_ep/{purpose}/{','.join(map(str, ranks))}"
        self._counter = f"{name}/{rank}"  # of those that this rank has made
        self._prefix = f"{name}/{store.add(self._counter, 1)}"
        self._round = 0

    def Get_rank(self) -> int:
        return self._ranks.index(self._rank)

    def Get_size(self) -> int:
        return len(self._ranks)

    def allgather(self, block: bytes, patience: float | None = None) -> list[bytes]:
        """Collective: the blocks of all ranks, by rank. Raises Absent after `patience` seconds."""
        self._tell(_GOOD + block)
        return self._hear("all_gather", patience=patience)

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

    def _hear(
        self, what: str, wanted: bytes | None = None, patience: float | None = None
    ) -> list[bytes]:
        """wanted: what all ranks must have told."""
        keys = {rank: self._key(self._round, rank) for rank in self._ranks}
        patience = _PATIENCE if patience is None else patience
        deadline, blocks = time.monotonic() + patience, []
        for rank, key in keys.items():  # one by one: there may be fewer than this rank expects
            try:
                left = max(deadline - time.monotonic(), 0.001)
                self._store.wait([key], timedelta(seconds=left))
            except Exception as error:
                self._store.add(self._counter, -1)  # the next one meets those that come late
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                absent = Absent(
                    f"{what}: rank {self._rank} waited {patience:g} s in the store for ranks "
                    f"{missing} of {list(self._ranks)} (expected to ask for the same ranks)",
                    "timeout",
                    self._rank,
                )
                absent.ranks = missing
                raise absent from error
            block = self._store.get(key)
            if block[:1] == _REFUSED:
                reason = f"{what}: rank {rank} refused the call: {block[1:].decode()}"
                raise InvalidArgument(reason, rank=self._rank)
            if wanted is not None and block[1:] != wanted:
                _refuse_unequal(what, rank, block[1:].decode(), self._rank, wanted.decode())
            blocks.append(block)
        # Whoever has come here has read the round before; some stores cannot delete.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(self._key(self._round - 1, self._rank))
        return [block[1:] for block in blocks]


class Meeting:
    """Brings ranks of a buffer together, by a store unless there is a group or a communicator."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, comm: Any) -> None:
        """rank: this one's number, also in the group."""
        self._rank, self._group, self._comm = rank, group, comm
        self.store: dist.Store | None = None

    def agreed(
        self, ranks: tuple[int, ...], what: str, check: Callable[[], None], equal: str
    ) -> None:
        """Collective among `ranks`, ascending. As `StoreRanks.agreed`."""
        if self._group is None and self._comm is None:
            if self.store is None:
                raise ValueError(f"{what}: neither group nor comm nor a store is given")
            StoreRanks(self.store, self._rank, ranks, "connect").agreed(what, check, equal)
            return
        met = self.of(ranks)

        def check_all() -> None:
            here = (ranks.index(self._rank), len(ranks))
            if (met.rank, met.num_ranks) != here:
                reason = f"{what}: rank {self._rank} is (rank, num_ranks) = {here} of {list(ranks)}"
                found = f"(expected {(met.rank, met.num_ranks)}, the group's)"
                raise InvalidArgument(f"{reason} {found}", rank=self._rank)
            check()

        met.agreed(what, check_all)
        for rank, told in zip(ranks, met.all_gather(equal.encode())):
            if told != equal.encode():
                _refuse_unequal(what, rank, told.decode(), self._rank, equal)

    def absent(self, ranks: tuple[int, ...], patience: float) -> list[int] | None:
        """Collective among `ranks`, ascending: those of them that do not come to the store within
        `patience` seconds. None where it is not by a store that they meet."""
        if self._group is not None or self._comm is not None or self.store is None:
            return None
        try:
            StoreRanks(self.store, self._rank, ranks, "barrier").allgather(b"", patience)
        except Absent as error:
            return error.ranks
        return []

    def of(self, ranks: tuple[int, ...]) -> Group:
        """Collective among `ranks`, ascending: their group."""
        if self._group is not None:
            if len(ranks) == dist.get_world_size(self._group):
                return Group.of(self._group)
            if not hasattr(self._group, "get_group_store"):
                version = f"torch {torch.__version__}"
                raise NotInWeft(f"some of a group's ranks with {version} (give a tcp_store_group)")
            store = self._group.get_group_store()
        elif self._comm is not None:
            if len(ranks) == self._comm.Get_size():
                return MpiGroup(self._comm)
            members = self._comm.Get_group().Incl(list(ranks))
            return MpiGroup(self._comm.Create_group(members), ranks)
        else:
            store = self.store
        return MpiGroup(StoreRanks(store, self._rank, ranks, "call"), ranks)


def _refuse_unequal(what: str, rank: int, there: str, here: int, told: str) -> NoReturn:
    reason = f"{what}: {there} on rank {rank} and {told} on rank {here}"
    raise InvalidArgument(f"{reason} (must be equal on all ranks)", rank=here)
