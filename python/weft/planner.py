# SPDX-License-Identifier: Apache-2.0
"""Planner behind `balance` of `Exchange.plan`, as a function of counts, for callers who send tokens
to physical experts by other means: which experts get replicas, and which routes go there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft import _core
from weft.errors import InvalidArgument
from weft.placement import as_int32


class PlannedBalance:
    """Result of `plan_balance`, on the CPU. A *physical expert* is a place where an expert's
    weights lie: rank r has those from r * (El + R) on, El masters and then R replicas.

    placement int32 [ranks, R]: the expert of each replica, -1 where the place stays empty.
    quotas int64 [ranks, ranks * (El + R)]: routes of each source to each physical expert.
    """

    def __init__(
        self, core: _core.Balance, num_ranks: int, num_experts: int, replicas: int
    ) -> None:
        self._core = core
        self.placement = torch.empty(num_ranks, replicas, dtype=torch.int32, device="cpu")
        core.replicas(self.placement)
        places = num_experts + num_ranks * replicas
        self.quotas = torch.empty(num_ranks, places, dtype=torch.int64, device="cpu")
        core.quotas(self.quotas)

    @property
    def rows_of_ranks(self) -> Tensor:
        """Routes to each rank, int64 [ranks]."""
        return self.quotas.sum(0).view(len(self.placement), -1).sum(1)

    def assign(self, source: int, topk_idx: Tensor) -> Tensor:
        """Returns the physical expert of each route of rank `source`, like topk_idx [T, K], -1
        where topk_idx is. Raises InvalidArgument for routes that were not counted.
        """
        if not 0 <= source < len(self.placement):
            raise InvalidArgument(f"source = {source} (expected 0 to {len(self.placement) - 1})")
        experts = as_int32("topk_idx", topk_idx)
        out = torch.empty_like(experts)
        self._core.assign(source, experts, out)
        return out.to(topk_idx)


def plan_balance(
    counts: Tensor,
    replicas: int,
    *,
    min_rows: int = 1,
    domains: Sequence[Sequence[int]] = (),
    block_rows: int = 1,
    replica_rows: int = 0,
) -> PlannedBalance:
    """Plans replicas that make all ranks about equally busy; equal arguments, equal result.

    counts [ranks, E], integers: routes from each rank to each expert; E divisible by the ranks, as
    for `Exchange`. replicas: R, most on each rank, 0 to 16. min_rows: fewest of a replica. domains:
    `Group.domains`; with several, rows stay in their domain if they can. block_rows above
    1: an expert's replicas by ascending rank, then its master take intervals of its rows by source,
    then token, and replicas whole blocks of so many rows; domains do not count. replica_rows: what
    a replica's weights cost, see `Balancing`. Raises InvalidArgument for sizes that do not fit.
    """
    if counts.dim() != 2 or counts.is_floating_point():
        raise InvalidArgument(
            f"counts is {counts.dtype} {list(counts.shape)} (expected integers [ranks, experts])"
        )
    num_ranks, num_experts = counts.shape
    domain_of = [0] * num_ranks if domains else []
    for domain, ranks in enumerate(domains):
        for rank in ranks:
            domain_of[rank] = domain
    given = as_int32("counts", counts)
    core = _core.plan_balance(
        given, num_ranks, replicas, min_rows, domain_of, block_rows, replica_rows
    )
    return PlannedBalance(core, num_ranks, num_experts, replicas)
