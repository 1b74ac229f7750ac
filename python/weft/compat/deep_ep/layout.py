# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a host ("RDMA ranks") or an NVLink domain, and destinations of tokens, in
whatever form callers give them."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft import Group, _core
from weft.compat import environment
from weft.streams import stream_of

from .checks import INTEGERS, MAX_TOPK, check, check_optional, check_tensor

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
        self.num_hosts = len(self.ranks)
        self.are_several = self.num_hosts > 1
        self.num_ranks = sum(len(host) for host in self.ranks)
        self.host_of = [0] * self.num_ranks
        for host, members in enumerate(self.ranks):
            for member in members:
                self.host_of[member] = host
        self.here = self.host_of[rank]
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def of_ranks(self, device: torch.device) -> torch.Tensor:
        """int64 [R] on `device`: the host of each rank."""
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.host_of, device=device)
        return self._on_device[device]


ENVIRONMENT = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def found_ranks_per_domain(group: Group) -> int:
    """Returns the size of the group's domains if equal blocks of adjacent ranks; else all ranks.

    Exchanges work with other domains, too, which just have no single size.
    """
    domains = group.domains
    size = len(domains[0])
    blocks = [list(range(first, first + size)) for first in range(0, group.num_ranks, size)]
    return size if sorted(sorted(domain) for domain in domains) == blocks else group.num_ranks


def ranks_per_domain(group: Group) -> int:
    """Returns `found_ranks_per_domain`, or the environment's number, with a warning if different.

    Raises InvalidArgument if the number of ranks is not a multiple of it.
    """
    found = found_ranks_per_domain(group)
    size = environment.number(ENVIRONMENT, default=found)
    check(
        group.num_ranks % size == 0,
        f"{ENVIRONMENT} = '{size}' (expected a divisor of the {group.num_ranks} ranks)",
    )
    if size != found:
        text = f"{ENVIRONMENT} = {size} replaces the {found} ranks per domain that were found"
        warnings.warn(text, stacklevel=5)
    return size


class Layout(NamedTuple):
    """Counts and flags that `get_dispatch_layout` returns, without the event."""

    num_tokens_per_rank: Tensor  # int32 [R]
    num_tokens_per_rdma_rank: Tensor | None  # int32 [hosts], None for one host
    num_tokens_per_expert: Tensor  # int32 [E]
    is_token_in_rank: Tensor  # bool [T, R]


def layout_of(topk_idx: Tensor, num_experts: int, hosts: Hosts) -> Layout:
    """Counts the choices in topk_idx [T, K], without values outside [0, num_experts).

    A token counts once for a rank or a host however many of its experts are there.
    """
    of_rank = hosts.of_ranks(topk_idx.device) if hosts.are_several else None
    sizes = (num_experts, hosts.num_ranks, of_rank, hosts.num_hosts)
    return Layout(*_core.count_routing(topk_idx, *sizes, stream_of(topk_idx)))


def routes_of(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Returns topk_idx with -1 for every value that is no expert."""
    return topk_idx.masked_fill((topk_idx < 0) | (topk_idx >= num_experts), -1)


def routes_to_ranks(is_token_in_rank: Tensor, num_local_experts: int) -> Tensor:
    """Makes routes without top-k, to some expert of each rank: int64 [T, min(R, 32)]."""
    num_ranks = is_token_in_rank.size(1)
    first_expert = torch.arange(num_ranks, device=is_token_in_rank.device) * num_local_experts
    routes = torch.where(is_token_in_rank, first_expert, -1)
    if num_ranks > MAX_TOPK:  # no token has more routes than that, so what is cut off is empty
        routes = routes.sort(dim=1, descending=True).values[:, :MAX_TOPK]
    return routes.contiguous()


def scatter_columns(indices: Tensor, values: Tensor | None, num_columns: int) -> Tensor:
    """Puts values [rows, K] in columns `indices` [rows, K] of zeros [rows, num_columns].

    Without values: bool, True there. Indices outside [0, num_columns) are skipped.
    """
    is_inside = (indices >= 0) & (indices < num_columns)
    columns = torch.where(is_inside, indices, num_columns).to(torch.int64)
    dtype = torch.bool if values is None else values.dtype
    table = torch.zeros((columns.size(0), num_columns + 1), dtype=dtype, device=columns.device)
    table.scatter_(1, columns, True if values is None else values)
    return table[:, :num_columns].contiguous()


def spread(
    topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Makes the map bool [T, num_experts] of topk_idx [T, K], and weights fp32 [T, num_experts] or
    None, as `scatter_columns` would, in one launch."""
    return _core.spread_routing(topk_idx, topk_weights, num_experts, stream_of(topk_idx))


class Routing(NamedTuple):
    """A map [T, E] and probs fp32 [T, E] or None. indices: the map's source, if the plan shall
    refuse values outside [-1, E)."""

    map: Tensor
    probs: Tensor | None
    indices: Tensor | None = None

    def most_routes(self) -> int:
        """Returns the most routes of a token here. Waits for a GPU."""
        return int(self.map.sum(dim=1).max()) if self.map.numel() > 0 else 0


def routing_of(
    given: tuple[Tensor | None, ...], num_experts: int | None, may_wait: bool
) -> Routing:
    """Reads routing_map, probs, topk_idx, topk_weights; a map goes before indices.

    may_wait: whether the call waits for a GPU, which can then refuse indices outside [-1, E);
    otherwise such indices name no route. num_experts is needed with indices and checked with a map.
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
    routes, spread_weights = spread(topk_idx, topk_weights, num_experts)
    if topk_weights is not None:
        probs = spread_weights
    is_checked = may_wait or not topk_idx.is_cuda
    return Routing(routes, probs, topk_idx if is_checked else None)
