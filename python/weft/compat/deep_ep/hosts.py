# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a host, as the interface counts hosts ("RDMA ranks")."""

from __future__ import annotations

from collections.abc import Sequence

import torch

HOST_RANKS = 8  # at most


class Hosts:
    """The ranks of a group by host, seen from `rank`.

    domains: ranks that can map each other's memory. A domain is a host; one of more than 8 ranks
    counts as several, of 8 each.
    """

    def __init__(self, domains: Sequence[Sequence[int]], rank: int) -> None:
        self.ranks: list[list[int]] = []  # by host
        for domain in sorted(sorted(one) for one in domains):
            for first in range(0, len(domain), HOST_RANKS):
                self.ranks.append(domain[first : first + HOST_RANKS])
        self.num_ranks = sum(len(host) for host in self.ranks)
        self.host_of = [0] * self.num_ranks
        for host, members in enumerate(self.ranks):
            for member in members:
                self.host_of[member] = host
        self.here = self.host_of[rank]
        self._on_device: dict[torch.device, torch.Tensor] = {}

    @property
    def num_hosts(self) -> int:
        return len(self.ranks)

    @property
    def are_several(self) -> bool:
        return len(self.ranks) > 1

    def of_ranks(self, device: torch.device) -> torch.Tensor:
        """int64 [R + 1] on `device`: the host of each rank; behind them one that is none."""
        if device not in self._on_device:
            table = torch.tensor([*self.host_of, self.num_hosts], device=device)
            self._on_device[device] = table
        return self._on_device[device]
