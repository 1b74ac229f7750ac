# SPDX-License-Identifier: Apache-2.0
"""The routing that callers of `HybridEPBuffer` give, as a bool map with dense weights."""

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor

from ..checks import BadCall, check, check_integers, check_least
from ..layout import scatter_columns
from ..payload import row_major


@dataclasses.dataclass(frozen=True)
class Routing:
    """A map [T, E] and probs fp32 [T, E] or None; `refused` are indices that a plan must refuse."""

    map: Tensor
    probs: Tensor | None
    refused: Tensor | None = None

    @property
    def accepted(self) -> Tensor | None:
        """The map to plan with. None if there is something to refuse: given `refused` instead,
        `Exchange.plan` raises on every rank."""
        return self.map if self.refused is None else None

    def most_routes(self) -> int:
        """The most routes that a token of this rank has. Waits for a GPU."""
        return int(self.map.sum(dim=1).max()) if self.map.numel() > 0 else 0


def routing_of(
    verb: str, given: tuple[Tensor | None, ...], num_experts: int | None, may_wait: bool
) -> Routing:
    """given: routing_map, probs, topk_idx, topk_weights. A map counts if indices are given too.

    may_wait: whether indices on a GPU are worth a wait to refuse those outside [-1, E); otherwise
    such indices name no route. num_experts is needed with indices and checked with a map.
    """
    routing_map, probs, topk_idx, topk_weights = given
    if routing_map is not None:
        check(
            routing_map.dtype == torch.bool and routing_map.dim() == 2,
            f"{verb}: routing_map is {routing_map.dtype} {list(routing_map.shape)} "
            "(expected bool [tokens, experts])",
        )
        check(
            num_experts is None or routing_map.size(1) == num_experts,
            f"{verb}: routing_map has {routing_map.size(1)} columns "
            f"(expected {num_experts}, the experts of all ranks)",
        )
        return Routing(routing_map, probs)
    no_routing = f"{verb}: no routing (expected a handle, routing_map or topk_idx)"
    check(topk_idx is not None, no_routing)
    check_integers(verb, topk_idx)
    check(num_experts is not None, f"{verb}: num_of_experts is None (required with topk_idx)")
    routes = scatter_columns(topk_idx, None, num_experts)
    if topk_weights is not None:
        probs = scatter_columns(topk_idx, topk_weights, num_experts)
    refused = None
    if may_wait or not topk_idx.is_cuda:
        is_wrong = (topk_idx < -1) | (topk_idx >= num_experts)
        refused = topk_idx if bool(is_wrong.any()) else None
    return Routing(routes, probs, refused)


def count_of(verb: str, name: str, value: Any) -> int:
    """`value` (an int, or anything with __index__: a 0-d tensor) as an int of at least 0."""
    try:
        count = operator.index(value)
    except TypeError:
        raise BadCall(f"{verb}: {name} = {value!r} (expected an integer)") from None
    check_least(f"{verb}: {name}", count, 0)
    return count


def is_bytes(hidden: Tensor) -> bool:
    """Whether rows are of a one-byte dtype, which is moved but never computed with."""
    return hidden.element_size() == 1


def scales_of(hidden: Tensor, scaling_factor: Tensor | None) -> Tensor | None:
    """The scaling factors that travel: none beside rows of a wider dtype."""
    if scaling_factor is None or not is_bytes(hidden):
        return None
    return row_major(scaling_factor)
