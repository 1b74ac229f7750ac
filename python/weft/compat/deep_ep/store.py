# SPDX-License-Identifier: Apache-2.0
"""How some of the ranks connect: by a store of torch.distributed, without a process group, or in a
process group or a communicator of mpi4py."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from weft import Group
from weft.errors import InvalidArgument, TimeoutError

from .checks import NotInWeft
from .runtime import MpiGroup

_LIFE = secrets.token_hex(8)  # of this process: process ids come again
_PATIENCE = 300  # seconds for all ranks to come, as callers of this interface are used to


class Absent(TimeoutError):
    """`ranks` have not come to the store in time."""

    ranks: list[int]


class StoreRanks:
    """One meeting of ranks in a store, with the methods of an mpi4py communicator for `MpiGroup`.

    A killed process leaves its keys in the store, and the next one in its place comes to the
    others' meeting all the same. So nothing is counted: a roster, which all ranks change and read,
    has each rank's token, new for each meeting, and a hash of all tokens that it has seen. Once all
    hashes agree, they name the meeting, and all later keys are below that name.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], purpose: str) -> None:
        """ranks: those that meet, ascending."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._roster = f"weft/nixl_ep/{purpose}/{','.join(map(str, ranks))}"
        self.prefix = ""  # of the meeting's keys
        self._round = 0

    def Get_rank(self) -> int:
        return self._ranks.index(self._rank)

    def Get_size(self) -> int:
        return len(self._ranks)

    def allgather(self, block: bytes, patience: float | None = None) -> list[bytes]:
        """Collective. Returns all ranks' blocks, by rank. Absent after `patience` seconds."""
        return self._swap("all_gather", block, patience)

    def agreed(self, what: str, make: Callable[[], None], equal: str) -> None:
        """Collective. Calls make(). If one rank's raises, all others raise InvalidArgument, and all
        do if `equal`, settings in words, differs. A rank that raises waits for no rank."""
        try:
            make()
        except Exception as error:
            self._refuse(str(error) or "?")
            raise
        for rank, told in zip(self._ranks, self._swap(what, equal.encode())):
            if told != equal.encode():
                _refuse_unequal(what, rank, told.decode(), self._rank, equal)

    def _swap(self, what: str, block: bytes, patience: float | None = None) -> list[bytes]:
        patience = _PATIENCE if patience is None else patience
        deadline, blocks = time.monotonic() + patience, []
        if not self.prefix:
            self._meet(what, deadline, patience)
        self._round += 1
        self._store.set(self._key(self._round, self._rank), block)
        keys = {rank: self._key(self._round, rank) for rank in self._ranks}
        for key in keys.values():  # one by one: there may be fewer than this rank expects
            try:
                left = max(deadline - time.monotonic(), 0.001)
                self._store.wait([key], timedelta(seconds=left))
            except Exception as error:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                raise self._absent(what, missing, patience) from error
            blocks.append(self._store.get(key))
        # All ranks that have come here have read the round before; some stores cannot delete.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(self._key(self._round - 1, self._rank))
        return blocks

    def _key(self, number: int, rank: int) -> str:
        return f"{self.prefix}/{number}/{rank}"

    def _absent(self, what: str, missing: list[int], patience: float) -> Absent:
        absent = Absent(
            f"{what}: rank {self._rank} waited {patience:g} s in the store for ranks {missing} of "
            f"{list(self._ranks)} (expected to ask for the same ranks)",
            "timeout",
            self._rank,
        )
        absent.ranks = missing
        return absent

    def _change(self, change: Callable[[_Roster, _Entry], None]) -> _Roster:
        """Applies change(roster, this rank's entry) atomically; returns the new roster."""
        while True:
            is_there = self._store.check([self._roster])
            old = self._store.get(self._roster).decode() if is_there else ""
            roster = json.loads(old) if old else {}
            here = roster.get(str(self._rank), {})
            if here.get("process") != _process():
                here = roster[str(self._rank)] = {"process": _process(), "refusals": []}
            change(roster, here)
            new = json.dumps(roster)
            if new == old or self._store.compare_set(self._roster, old, new).decode() == new:
                return roster

    def _take_refusal(self, roster: _Roster, rank: int) -> str | None:
        """Returns the rank's first reason for a refusal not heard here, marked as heard."""
        refusals = roster.get(str(rank), {}).get("refusals", [])
        for refusal in refusals:
            if self._rank not in refusal["heard"]:
                refusal["heard"].append(self._rank)
                if len(refusal["heard"]) == len(self._ranks):
                    refusals.remove(refusal)
                return refusal["reason"]
        return None

    def _meet(self, what: str, deadline: float, patience: float) -> None:
        """Meets; Absent, or InvalidArgument if a rank refused the call."""
        token = secrets.token_hex(8)
        refused: list[tuple[int, str]] = []

        def come(roster: _Roster, here: _Entry) -> None:
            found = [(rank, self._take_refusal(roster, rank)) for rank in self._ranks]
            refused[:] = [(rank, reason) for rank, reason in found if reason is not None]
            here["token"] = "" if refused else token  # a rank that raises is in no meeting
            here["knows"] = "" if refused else self._known(roster)

        for pause in itertools.chain((0.001, 0.002, 0.005, 0.01, 0.02), itertools.repeat(0.05)):
            roster = self._change(come)
            if refused:
                rank, reason = refused[0]
                text = f"{what}: rank {rank} refused the call: {reason}"
                raise InvalidArgument(text, rank=self._rank)
            meeting = self._known(roster)
            entries = {rank: roster.get(str(rank), {}) for rank in self._ranks}
            missing = [rank for rank, one in entries.items() if one.get("knows") != meeting]
            if not missing:
                self.prefix = f"{self._roster}/{meeting}"
                return
            if time.monotonic() >= deadline:
                raise self._absent(what, missing, patience)
            time.sleep(pause)

    def _known(self, roster: _Roster) -> str:
        """Hashes all tokens."""
        tokens = [roster.get(str(rank), {}).get("token", "") for rank in self._ranks]
        return hashlib.sha256(",".join(tokens).encode()).hexdigest()[:32]

    def _refuse(self, reason: str) -> None:
        """Tells each other rank the reason, unless it has refused the same call."""

        def refuse(roster: _Roster, here: _Entry) -> None:
            others = [rank for rank in self._ranks if rank != self._rank]
            heard = [rank for rank in others if self._take_refusal(roster, rank) is not None]
            if len(heard) < len(others):
                here["refusals"].append({"reason": reason, "heard": [self._rank, *heard]})

        self._change(refuse)


# Of a rank: its process, token, the hash of tokens it knows, its refused calls.
_Entry = dict[str, Any]
_Roster = dict[str, _Entry]  # by rank, as text


def _process() -> str:
    return f"{os.getpid()}.{_LIFE}"


class Meeting:
    """Brings ranks of a buffer together, by a store unless there is a group or a communicator."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, comm: Any) -> None:
        """rank: this one's number, also in the group."""
        self._rank, self._group, self._comm = rank, group, comm
        self.store: dist.Store | None = None
        self._last = ""  # name of the meeting that was agreed by a store

    def agreed(
        self, ranks: tuple[int, ...], what: str, check: Callable[[], None], equal: str
    ) -> None:
        """Does `StoreRanks.agreed` among `ranks`, ascending; collective."""
        if self._group is None and self._comm is None:
            if self.store is None:
                raise ValueError(f"{what}: neither group nor comm nor a store is given")
            met = StoreRanks(self.store, self._rank, ranks, "connect")
            met.agreed(what, check, equal)
            self._last = met.prefix
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
        """Collective among `ranks`, ascending. Returns those that do not come to the store within
        `patience` seconds; None without a store."""
        if self._group is not None or self._comm is not None or self.store is None:
            return None
        try:
            StoreRanks(self.store, self._rank, ranks, "barrier").allgather(b"", patience)
        except Absent as error:
            return error.ranks
        return []

    def comers(self, ranks: tuple[int, ...], patience: float) -> tuple[int, ...]:
        """Returns those of `ranks`, ascending, that come to their first call within `patience`
        seconds, collective among them; all if no store agreed them. Absent if one calls with other
        ranks."""
        if not self._last or self.store is None:
            return ranks
        store, told = self.store, ",".join(map(str, ranks)).encode()
        asks = {rank: f"{self._last}/asks/{rank}" for rank in ranks}  # for which it waits, if any
        store.set(asks[self._rank], told)
        name, place = f"{self._last}/first/{told.decode()}", ranks.index(self._rank)
        came = tuple(ranks[one] for one in comers(store, name, place, len(ranks), patience))
        for rank in sorted(set(ranks).difference(came)):
            asked = store.get(asks[rank]) if store.check([asks[rank]]) else b""
            if asked not in (b"", told):
                text = f"rank {self._rank} calls with ranks {list(ranks)}, and rank {rank} with"
                others = [int(one) for one in asked.split(b",")]
                raise Absent(f"{text} ranks {others} (expected the same mask)", "timeout", rank)
        store.set(asks[self._rank], b"")
        return came

    def of(self, ranks: tuple[int, ...]) -> Group:
        """Returns the group of `ranks`, ascending; collective."""
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


def comers(
    store: dist.Store, name: str, rank: int, num_ranks: int, patience: float
) -> tuple[int, ...]:
    """Returns which ranks come to the meeting `name` within `patience` seconds, ascending, the same
    for all of them; collective. A later rank gets the same list, without itself."""
    keys = [f"{name}/{one}" for one in range(num_ranks)]
    store.set(keys[rank], b"1")
    deadline = time.monotonic() + patience
    for pause in itertools.chain((0.001, 0.002, 0.005, 0.01, 0.02), itertools.repeat(0.05)):
        if store.check([f"{name}/came"]):
            break
        if store.check(keys) or time.monotonic() >= deadline:
            here = [one for one, key in enumerate(keys) if store.check([key])]
            store.compare_set(f"{name}/came", "", json.dumps(here))  # the first one's counts
            break
        time.sleep(pause)
    return tuple(json.loads(store.get(f"{name}/came")))


def _refuse_unequal(what: str, rank: int, there: str, here: int, told: str) -> NoReturn:
    reason = f"{what}: {there} on rank {rank} and {told} on rank {here}"
    raise InvalidArgument(f"{reason} (must be equal on all ranks)", rank=here)
