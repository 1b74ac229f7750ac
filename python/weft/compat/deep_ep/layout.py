# SPDX-License-Identifier: Apache-2.0
"""Which tokens go to which rank and expert, as numbers that a caller can look at."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import check
from .hosts import Hosts

Tensor = torch.Tensor

MAX_TOPK = 32


class Layout(NamedTuple):
    """What `get_dispatch_layout` returns, less the event."""

    num_tokens_per_rank: Tensor  # int32 [R]
    num_tokens_per_rdma_rank: Tensor | None  # int32 [hosts], None for one host
    num_tokens_per_expert: Tensor  # int32 [E]
    is_token_in_rank: Tensor  # bool [T, R]


def layout_of(topk_idx: Tensor, num_experts: int, hosts: Hosts) -> Layout:
    """Counts of the choices in topk_idx [T, K]; values outside [0, num_experts) do not count.

    A token counts once for a rank or a host however many of its experts are there.
    """
    device, num_ranks = topk_idx.device, hosts.num_ranks
    idx = topk_idx.long()
    is_route = (idx >= 0) & (idx < num_experts)
    expert = torch.where(is_route, idx, num_experts)  # one more, for those that do not count
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten()).int())
    rank = torch.where(is_route, idx // (num_experts // num_ranks), num_ranks)
    in_rank = _marks(rank, num_ranks)
    per_host = None
    if hosts.are_several:
        in_host = _marks(hosts.of_ranks(device)[rank], hosts.num_hosts)
        per_host = in_host.sum(0, dtype=torch.int32)
    return Layout(
        num_tokens_per_rank=in_rank.sum(0, dtype=torch.int32),
        num_tokens_per_rdma_rank=per_host,
        num_tokens_per_expert=per_expert[:num_experts],
        is_token_in_rank=in_rank,
    )


def routes_of(topk_idx: Tensor, num_experts: int) -> Tensor:
    """topk_idx with -1 in place of every value that names no expert."""
    return topk_idx.masked_fill((topk_idx < 0) | (topk_idx >= num_experts), -1)


def routes_to_ranks(is_token_in_rank: Tensor, num_local_experts: int) -> Tensor:
    """int64 [T, min(R, 32)]: for callers without top-k, a route to some expert of each rank."""
    num_ranks = is_token_in_rank.size(1)
    first_expert = torch.arange(num_ranks, device=is_token_in_rank.device) * num_local_experts
    routes = torch.where(is_token_in_rank, first_expert, -1)
    if num_ranks > MAX_TOPK:  # no token has more routes than that, so what is cut off is empty
        routes = routes.sort(dim=1, descending=True).values[:, :MAX_TOPK]
    return routes.contiguous()


def check_topk(verb: str, topk_idx: Tensor) -> None:
    """Of integers, [T, K] with K from 1 to 32."""
    check(
        topk_idx.dtype in (torch.int64, torch.int32),
        f"{verb}: topk_idx has dtype {topk_idx.dtype} (expected torch.int64)",
    )
    check(
        topk_idx.dim() == 2 and 1 <= topk_idx.size(1) <= MAX_TOPK,
        f"{verb}: topk_idx has shape {list(topk_idx.shape)} (expected [T, K <= {MAX_TOPK}])",
    )


def check_experts(verb: str, num_experts: int, num_ranks: int) -> None:
    check(
        num_experts > 0 and num_experts % num_ranks == 0,
        f"{verb}: num_experts = {num_experts} (expected a positive multiple of {num_ranks} ranks)",
    )


def _marks(columns: Tensor, num_columns: int) -> Tensor:
    """bool [T, num_columns], True in the columns [T, K]; number num_columns stands for none."""
    marks = torch.zeros((columns.size(0), num_columns + 1), dtype=torch.bool, device=columns.device)
    return marks.scatter_(1, columns, True)[:, :num_columns].contiguous()
