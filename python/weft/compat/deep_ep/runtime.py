# SPDX-License-Identifier: Apache-2.0
"""What a `Buffer` runs on: the ranks, their exchanges and a communication stream."""

from __future__ import annotations

from typing import Any

import torch

from weft import Group, _core
from weft.streams import CommStream

from .exchange_pool import ExchangePool
from .hosts import Hosts

TIMEOUT = 100.0  # seconds of every wait: what callers of this interface are used to


class Runtime:
    """Lives from the constructor of a `Buffer` to `destroy`."""

    def __init__(self, group: Group, timeout: float = TIMEOUT) -> None:
        """timeout: seconds, of every wait."""
        self.group = group
        self.hosts = Hosts(group.domains, group.rank)
        self.exchanges = ExchangePool(group, timeout)
        self.stream = CommStream()

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        """Hosts as the interface counts them: domains, of at most 8 ranks each."""
        return self.hosts.num_hosts

    def get_rdma_rank(self) -> int:
        """This rank's host, from 0."""
        return self.hosts.here

    def is_internode_available(self) -> bool:
        """Whether the ranks are on several hosts."""
        return self.hosts.are_several

    def get_local_device_id(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else -1


class MpiGroup(Group):
    """The ranks of an mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        """Collective."""
        self._process_group = lambda: None
        self.core = _core.Group.from_all_gather(comm.Get_rank(), comm.Get_size(), comm.allgather)
