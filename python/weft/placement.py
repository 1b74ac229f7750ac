# SPDX-License-Identifier: Apache-2.0
"""Places of replicas of popular experts: what `balance` of `Exchange.plan` may be."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _core
from weft.errors import InvalidArgument


class Balancing(NamedTuple):
    """Replicas that each plan places anew by its route counts."""

    replicas: int  # R, places for them on each rank, at most 16
    min_rows: int = 1  # least rows of a replica: fewer are not worth it
    # Above 1: an expert's replicas by ascending rank, then its master take intervals of its rows by
    # source rank, then token, and replicas whole blocks of so many. At most 1024.
    block_rows: int = 1
    # Cost of a replica's weights, in rows (`replica_rows`). A call in which replicas spare the
    # busiest rank no more than they cost the rank that sends or gets most has none, and
    # `Plan.load.is_forgone` says so.
    replica_rows: int = 0


def as_int32(name: str, values: Tensor) -> Tensor:
    """Copies to the CPU. Raises InvalidArgument for values beyond int32."""
    given = values.to("cpu")
    found = given.to(torch.int32)
    if not torch.equal(found.to(given.dtype), given):
        raise InvalidArgument(f"{name} has {given.dtype} values that are no int32")
    return found.contiguous()


class Placement:
    """Replicas that stay in place for many plans, as servers place them by past popularity.

    replicas: int32 [ranks, R], the expert of each, -1: none; on each rank experts of others, each
    once. Rows are shared out among an expert's places so that ranks are as even as that allows.
    `Exchange.plan` checks them against its ranks and experts, `check` before that. block_rows: see
    `Balancing`; less than a block stays with the master.
    """

    def __init__(self, replicas: Tensor | Iterable[Iterable[int]], *, block_rows: int = 1) -> None:
        self.replicas = as_int32("placement", torch.as_tensor(replicas, device="cpu"))
        if self.replicas.dim() != 2:
            raise InvalidArgument(
                f"placement has {self.replicas.dim()} dimensions (2 are expected: ranks, replicas)"
            )
        experts = self.replicas.flatten().tolist()
        self._core = (self.replicas.size(1), 1, block_rows, 0, experts)

    @classmethod
    def from_counts(
        cls, counts: Tensor, num_ranks: int, replicas: int, *, min_rows: int = 1
    ) -> Placement:
        """Returns the planner's placement for counts, integers [..., E], of routes to each expert:
        of all ranks together, summed over the leading dimensions."""
        sums = counts.reshape(-1, counts.size(-1)).sum(0).tolist()
        found = _core.replicas_for(sums, num_ranks, replicas, min_rows)
        found = torch.tensor(found, dtype=torch.int32, device="cpu")
        return cls(found.reshape(num_ranks, replicas))

    @classmethod
    def from_routing_file(
        cls,
        path: str | os.PathLike[str],
        num_ranks: int,
        replicas: int,
        *,
        layer: int | None = None,
        min_rows: int = 1,
    ) -> Placement:
        """Returns the placement for a layer of a routing file (docs/routing_file.md), or all."""
        counts = torch.tensor(_core.count_routing_file(os.fspath(path), layer), device="cpu")
        return cls.from_counts(counts, num_ranks, replicas, min_rows=min_rows)

    def check(self, num_experts: int) -> None:
        """Raises InvalidArgument unless the replicas are allowed for num_experts experts."""
        count, *_, experts = self._core
        _core.check_replicas(experts, self.replicas.size(0), num_experts, count)

    def __repr__(self) -> str:
        return f"Placement({self.replicas.tolist()})"


def num_replicas(balance: Any) -> int:
    """Returns R of `balance`; 0 for a value that `core_balance` refuses."""
    try:
        return core_balance(balance)[0]
    except InvalidArgument:
        return 0


def core_balance(balance: Any) -> tuple[int, int, int, int, list[int]]:
    """Returns `balance` for the core: R, min_rows, block_rows, replica_rows, a placement or
    nothing."""
    if isinstance(balance, Placement):
        return balance._core
    if isinstance(balance, Balancing):
        return (*balance, [])
    if type(balance) is int:
        return balance, 1, 1, 0, []
    raise InvalidArgument(
        f"balance is a {type(balance).__name__} (expected a number of replicas, Balancing or "
        "Placement)"
    )


def replica_rows(
    weight_bytes: int, row_bytes: int, *, row_seconds: float = 0.0, link_rate: float = 0.0
) -> int:
    """Returns `Balancing.replica_rows`: how many rows take as long as a replica's weights, at
    least 1.

    weight_bytes: of an expert, times how often they travel (`Balance.replica_bytes`). row_bytes:
    likewise of a row. row_seconds: if it counts, a row's computation on its rank; link_rate: bytes
    per second between two ranks. All ranks have to give the same.
    """
    if weight_bytes < 0 or row_bytes <= 0 or row_seconds < 0 or link_rate < 0:
        raise InvalidArgument(
            f"weight_bytes = {weight_bytes}, row_bytes = {row_bytes}, row_seconds = {row_seconds}, "
            f"link_rate = {link_rate} (expected at least 0, row_bytes above)"
        )
    return max(1, math.ceil(weight_bytes / (row_bytes + row_seconds * link_rate)))


def balanced_rows(
    num_tokens: int, topk: int, num_local_experts: int, replicas: int, pad_multiple: int = 1
) -> int:
    """Returns a row budget for `expert_major` plans with replicas: the mean rank's rows, for
    num_tokens tokens in the mean, what the planner's search may leave above that, and padding.
    If that is not enough (`Plan.load`), `Plan.overflow` says that routes were dropped."""
    mean = num_tokens * topk
    slack = mean // _core.BALANCE_FINENESS
    return mean + slack + (num_local_experts + replicas) * (pad_multiple - 1)
