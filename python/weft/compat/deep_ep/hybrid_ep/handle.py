# SPDX-License-Identifier: Apache-2.0
"""Handles that `HybridEPBuffer.dispatch` and `dispatch_with_permute` return for later calls, and
the settings of the buffer, which they carry.

Items that only the kernels of `deep_ep` can use are `PrivateItem`s: unpacking works, and using one
raises an error that explains.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from weft import Plan

from ..handles import PlanHandle, on_host
from ..layout import scatter_columns


@dataclasses.dataclass
class HybridEPConfig:
    """Settings of the buffer that a handle carries. SM and block counts: 0 = chosen by Weft."""

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

    def changed(self, **settings: Any) -> HybridEPConfig:
        """Returns a copy with other, or more, settings; each call makes one."""
        made = HybridEPConfig.__new__(HybridEPConfig)
        vars(made).update(vars(self), **settings)
        return made


@dataclasses.dataclass
class HybridEPConfigurer:
    """Keeps the buffer's settings, which calls copy and change."""

    buffer_config: HybridEPConfig


_PRIVATE = ("sparse_to_dense_map", "rdma_to_attn_map", "dense_chunk_layout")


class PrivateItem:
    """Stands where `deep_ep` keeps a map for its own kernels; any use raises AttributeError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}: not kept by Weft, whose plan replaces it>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"handle: {self!r} has no {name}")


class HybridEPHandle(PlanHandle):
    """Common part of both kinds of handles."""

    def __init__(self, plan: Plan, config: HybridEPConfig) -> None:
        super().__init__(plan)
        self.config = config

    def _item(self, name: str) -> Any:
        return PrivateItem(name) if name in _PRIVATE else getattr(self, name)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.plan.num_tokens

    @property
    def attn_to_rdma_map(self) -> Tensor:
        """bool [T, nodes - 1]: which tokens of this rank go to each node but its own.

        From a copy of the plan on the host; on a GPU this waits.
        """
        nodes = self.config.num_of_nodes
        experts = self.config.num_of_ranks_per_node * self.plan.num_local_experts  # of a node
        shape = (self.plan.num_tokens, self.plan.topk)
        routes = torch.tensor(on_host(self.plan)["route_expert"], device="cpu").view(shape)
        to_node = torch.where(routes >= 0, routes // experts, -1)
        marks = scatter_columns(to_node, None, nodes)
        own = self.plan.exchange.rank // self.config.num_of_ranks_per_node
        others = [node for node in range(nodes) if node != own]
        return marks[:, others].to(self.plan.exchange.device)


class PlainHandle(HybridEPHandle):
    """Handle that `dispatch` returns. Its rows are those of a rank_major plan."""

    maker = "one of dispatch"
    items = (
        "sparse_to_dense_map",
        "rdma_to_attn_map",
        "attn_to_rdma_map",
        "num_dispatched_tokens_tensor",
        "local_expert_routing_map",
        "num_tokens",
        "config",
    )

    def __init__(self, plan: Plan, config: HybridEPConfig, ids: Tensor) -> None:
        """ids int32 [plan.num_rows, K]: this rank's experts of every row, -1 elsewhere."""
        super().__init__(plan, config)
        self.ids = ids

    @property
    def num_dispatched_tokens_tensor(self) -> Tensor:
        """int32 [1]: rows in use."""
        return self.plan.num_rows_used.to(torch.int32)

    @property
    def local_expert_routing_map(self) -> Tensor:
        """bool [plan.num_rows, El]: which of this rank's experts each row goes to."""
        return scatter_columns(self.ids, None, self.plan.num_local_experts)


class PermuteHandle(HybridEPHandle):
    """Handle that `dispatch_with_permute` returns. Its rows are those of an expert_major plan.

    Items 3, 4 and 6 (those about arrivals: tokens that reach this rank, once each) come from a
    copy of the plan on the host; on a GPU asking for one waits.
    """

    maker = "one of dispatch_with_permute"
    items = (
        *PlainHandle.items[:5],
        "dense_chunk_layout",
        "dense_to_expert_map",
        "tokens_per_expert",
        "num_tokens",
        "config",
        "overflow_flag",
    )

    def __init__(self, plan: Plan, config: HybridEPConfig, has_budget: bool) -> None:
        super().__init__(plan, config)
        self._has_budget = has_budget
        self._is_short: Tensor | None = None
        if has_budget:
            # Made here and not when asked for: a replayed CUDA graph must set it anew.
            self._is_short = (plan.num_rows_required > plan.num_rows).to(torch.int32)

    @property
    def overflow_flag(self) -> Tensor:
        """int32 [1] on the plan's device, without a wait: 1 if a row for this rank was dropped."""
        # A plan's own flag also tells of this rank's routes that others dropped: with a budget.
        return self.plan.overflow if self._is_short is None else self._is_short

    @property
    def tokens_per_expert(self) -> Tensor:
        """int32 [El] on the plan's device: rows that carry a token, without padding."""
        return self.plan.rows_per_expert.to(torch.int32)

    @property
    def num_dispatched_tokens_tensor(self) -> Tensor:
        """int32 [1]: arrivals. On the host, or beside the plan if it has a budget."""
        device = self.plan.exchange.device if self._has_budget else "cpu"
        count = sum(self.plan.received_arrivals)
        return torch.tensor([count], dtype=torch.int32, device=device)

    @property
    def local_expert_routing_map(self) -> Tensor:
        """bool [arrivals, El]: which of this rank's experts each arrival goes to."""
        return self.dense_to_expert_map >= 0

    @property
    def dense_to_expert_map(self) -> Tensor:
        """int32 [arrivals, El]: the row of each arrival at each expert, or -1."""
        rows: list[list[int]] = []
        for pair in on_host(self.plan)["received"]:
            bounds = pair["route_begin"]
            for first, last in itertools.pairwise(bounds):
                row = [-1] * self.plan.num_local_experts
                for route in range(first, last):
                    row[pair["expert"][route]] = pair["slot"][route]
                rows.append(row)
        table = torch.tensor(rows, dtype=torch.int32, device=self.plan.exchange.device)
        return table.view(len(rows), self.plan.num_local_experts)
