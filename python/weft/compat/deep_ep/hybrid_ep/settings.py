# SPDX-License-Identifier: Apache-2.0
"""The settings of a `HybridEPBuffer`, and the forms in which callers give a routing."""

import dataclasses
import operator
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import INTEGERS, BadCall, check, check_least, check_optional, check_tensor
from ..layout import scatter_columns

MIN_CAPACITY = 512


@dataclasses.dataclass
class HybridEPConfig:
    """What a handle carries of the buffer's settings. SM and block counts: 0 = chosen by Weft."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    use_fp8: bool = False
    pad_multiple: int = 0
    fuse_permute_dispatch: bool = False
    num_of_blocks_dispatch_api: int = 0
    num_of_blocks_combine_api: int = 0
    num_of_blocks_preprocessing_api: int = 0
    num_blocks_permute: int = 0
    num_blocks_unpermute: int = 0


@dataclasses.dataclass
class HybridEPConfigurer:
    """Keeps the buffer's settings, which calls copy and change."""

    buffer_config: HybridEPConfig


class Routing(NamedTuple):
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
    given: tuple[Tensor | None, ...], num_experts: int | None, may_wait: bool
) -> Routing:
    """given: routing_map, probs, topk_idx, topk_weights. A map counts if indices are given too.

    may_wait: whether indices on a GPU are worth a wait to refuse those outside [-1, E); otherwise
    such indices name no route. num_experts is needed with indices and checked with a map.
    """
    routing_map, probs, topk_idx, topk_weights = given
    if routing_map is not None:
        check_tensor("routing_map", routing_map, torch.bool, ["T", num_experts or "E"])
        check_optional("probs", probs, torch.float32, routing_map.shape)
        return Routing(routing_map, probs)
    check(topk_idx is not None, "no routing (expected a handle, routing_map or topk_idx)")
    check_tensor("topk_idx", topk_idx, INTEGERS, ["T", "K"])
    check_optional("topk_weights", topk_weights, torch.float32, topk_idx.shape)
    check(num_experts is not None, "num_of_experts is None (required with topk_idx)")
    routes = scatter_columns(topk_idx, None, num_experts)
    if topk_weights is not None:
        probs = scatter_columns(topk_idx, topk_weights, num_experts)
    refused = None
    if may_wait or not topk_idx.is_cuda:
        is_wrong = (topk_idx < -1) | (topk_idx >= num_experts)
        refused = topk_idx if bool(is_wrong.any()) else None
    return Routing(routes, probs, refused)


def count_of(name: str, value: Any) -> int:
    """`value` (an int, or anything with __index__: a 0-d tensor) as an int of at least 0."""
    try:
        count = operator.index(value)
    except TypeError:
        raise BadCall(f"{name} = {value!r} (expected an integer)") from None
    check_least(name, count, 0)
    return count


def warn_deprecated(verb: str, name: str, what: str = "ignored") -> None:
    warnings.warn(f"{verb}: {name} is deprecated and {what}", DeprecationWarning, stacklevel=3)
