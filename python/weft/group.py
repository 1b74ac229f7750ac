# SPDX-License-Identifier: Apache-2.0
"""The ranks that exchange tokens, those of a torch.distributed process group of any backend, as
exchange.py takes them."""

from __future__ import annotations

import atexit
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import _core
from weft.arrivals import Arrivals
from weft.errors import InvalidArgument, NotAvailable, PeerError, reason_of

PATIENCE = 0.5  # seconds until gloo has surely freed a collective's tensors: a guess

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
# Kept even if making the `Group` fails.
_arrivals: weakref.WeakKeyDictionary[dist.ProcessGroup, Arrivals] = weakref.WeakKeyDictionary()
_last_gathered = -PATIENCE  # when


def _let_go() -> None:
    """Waits until gloo's thread has freed the last collective's tensors, after its waiters go on.
    That needs the interpreter: once it has ended, the thread aborts the process."""
    time.sleep(max(0.0, _last_gathered + PATIENCE - time.monotonic()))


atexit.register(_let_go)


class Group:
    """Ranks, numbered as in the process group, not in the world."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Collective. `Group.of` keeps a Group per process group."""
        # A group must not keep its process group alive, which torch destroys.
        kept = weakref.ref(process_group)
        rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        arrivals = _arrivals.setdefault(process_group, Arrivals(rank, num_ranks))

        def all_gather(block: bytes) -> list[bytes]:
            alive = kept()
            if alive is None:
                raise NotAvailable("all_gather: the process group was destroyed", "not available")
            arrivals.await_all(alive)
            blocks: list[bytes] = [b""] * num_ranks
            try:
                dist.all_gather_object(blocks, block, group=alive)
            except RuntimeError as error:
                raise PeerError(f"all_gather: {error}", "peer failed", rank) from error
            global _last_gathered
            _last_gathered = time.monotonic()
            return blocks

        self._process_group = kept
        self.core = _core.Group.from_all_gather(rank, num_ranks, all_gather)

    @staticmethod
    def of(process_group: dist.ProcessGroup | DeviceMesh | None = None) -> Group:
        """Returns a process group's Group (None: the default one's; a DeviceMesh, of one dimension:
        its ranks'). Collective at the first call."""
        if isinstance(process_group, DeviceMesh):
            process_group = process_group.get_group()
        if process_group is None:
            process_group = dist.group.WORLD
        if process_group is None:
            raise NotAvailable(
                "group: torch.distributed is not initialised (call init_process_group first)",
                "not available",
            )
        if not isinstance(process_group, dist.ProcessGroup):
            raise InvalidArgument(
                f"group = {process_group!r} is a {type(process_group).__name__} (expected a "
                "process group of torch.distributed, or a weft.Group)"
            )
        if process_group not in _groups:
            _groups[process_group] = Group(process_group)
        return _groups[process_group]

    @staticmethod
    def rejoin(rank: int, invitation: str) -> Group:
        """Takes a lost rank's place: local, in a new process on the same host. invitation: text of
        `Exchange.invitation`. One exchange can be made with the Group, by the inviting exchange's
        arguments and its current max_tokens and max_topk; that waits for `Exchange.readmit`. Raises
        InvalidArgument for what is no invitation."""
        return _Rejoined(rank, invitation)

    @property
    def rank(self) -> int:
        return self.core.rank

    @property
    def num_ranks(self) -> int:
        return self.core.num_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks' numbers in the world, or 0.. without a world."""
        if self.process_group is None:
            return tuple(range(self.num_ranks))
        return tuple(dist.get_process_group_ranks(self.process_group))

    @property
    def domains(self) -> list[list[int]]:
        """Ranks by domain: those that can map each other's memory."""
        return self.core.domains

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None once destroyed."""
        return self._process_group()

    def all_gather(self, block: bytes) -> list[bytes]:
        """Collective, for set-up. Returns every rank's block, by rank."""
        return self.core.all_gather(block)

    def agreed(self, what: str, make: Callable[[], Any]) -> Any:
        """Collective. Returns make(). If one rank's raises, others raise InvalidArgument."""
        made = problem = None
        try:
            made = make()
        except Exception as error:
            problem = error
        told = self.all_gather(b"" if problem is None else reason_of(problem).encode())
        if problem is not None:
            raise problem
        for rank, reason in enumerate(told):
            if reason:
                text = f"{what}: rank {rank} refused the call: {reason.decode()}"
                raise InvalidArgument(text, rank=self.rank)
        return made

    def gather_numbers(self, *here: int) -> list[tuple[int, ...]]:
        """Collective, for set-up. Returns every rank's `here`, by rank."""
        form = struct.Struct(f"<{len(here)}q")
        return [form.unpack(block) for block in self.all_gather(form.pack(*here))]


class _Rejoined(Group):
    def __init__(self, rank: int, invitation: str) -> None:
        self._process_group = lambda: None
        self.core = _core.Group.rejoin(rank, invitation)

    def agreed(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns make(), unheard by the others: they wait elsewhere."""
        return make()
