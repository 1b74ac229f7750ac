# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer around any token dispatcher: router, grouped SwiGLU experts, weights.
moe_layer.py and qwen3_model.py use it."""

import torch
from torch import Tensor, nn

from weft.block_products import BLOCK_ROWS, block_linear
from weft.dispatcher import (
    DispatcherConfig,
    DispatcherGroups,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from weft.overlap import DelayedExperts, DelayedLinear
from weft.overlap.experts import row_ends

DISPATCHERS = ("alltoall", "deepep", "deepepv2", "hybridep", "ncclep", "uccl_ep")


def make_dispatcher(
    name: str,
    groups: DispatcherGroups,
    num_experts: int,
    topk: int,
    num_sms: int | None = None,
    capacity: float | None = None,
    replicas: int | None = None,
) -> MoETokenDispatcher:
    """Makes `name`: "alltoall" over torch.distributed, or a flex backend, which is Weft.

    num_sms: GPU multiprocessors of each exchange by Weft; None: by its table, often all. capacity:
    rows of a rank, of T times topk, for "hybridep"; None: as many as come, which the host waits to
    know. replicas: of popular experts, on each rank, with "hybridep"; a number, 0 too, has tokens
    summed in the order of their choices, so that replicas change no bit.
    """
    local = num_experts // groups.ep.size()
    first = groups.ep.rank() * local
    config = DispatcherConfig(
        num_moe_experts=num_experts,
        moe_router_topk=topk,
        moe_token_dispatcher_type="alltoall" if name == "alltoall" else "flex",
    )
    if name != "alltoall":
        config.moe_flex_dispatcher_backend = name
        config.moe_flex_dispatcher_num_sms = num_sms
    if capacity is not None:
        config.moe_expert_rank_capacity_factor = capacity
        config.moe_experts_ignore_unused_rows = True  # `DelayedExperts` do
    if replicas is not None and name == "hybridep":
        config.moe_combine_order = "topk"
        config.moe_balance_replicas = replicas
        config.moe_balance_block_rows = BLOCK_ROWS
    kind = MoEAlltoAllTokenDispatcher if name == "alltoall" else MoEFlexTokenDispatcher
    return kind(local, list(range(first, first + local)), config.validate(), groups)


class BlockExperts(DelayedExperts):
    """Experts that multiply whole blocks of rows, so that replicas do not change the bits."""

    def forward(self, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        sizes = counts.tolist()
        act = self._activate(block_linear(rows, self.up, sizes), probs, row_ends(counts, rows))
        return block_linear(act, self.down, sizes)


class MoELayer(nn.Module):
    """x [T, H] -> [T, H]: top-k experts of a softmax router, weighted."""

    def __init__(
        self,
        dispatcher: MoETokenDispatcher,
        hidden: int,
        width: int,
        num_experts: int,
        topk: int,
        delay: bool = False,
        has_blocks: bool = False,
    ) -> None:
        """delay: weight gradients are left to the modules' `backward_dw`. has_blocks: experts are
        `BlockExperts`, which leave none."""
        super().__init__()
        self.dispatcher = dispatcher
        self.topk = topk
        options = {"delay_wgrad_compute": delay}
        self.router = DelayedLinear(hidden, num_experts, bias=False, **options)
        sizes = (dispatcher.num_local_experts, hidden, width)
        self.experts = BlockExperts(*sizes) if has_blocks else DelayedExperts(*sizes, **options)
        if has_blocks and dispatcher.config.moe_balance_replicas > 0:
            dispatcher.replicate_experts(self.experts, wgrad="blocks")

    def reset(self, seed: int) -> None:
        """Gives an expert the same weights wherever it lives, and every rank the same router."""
        device = self.router.weight.device

        def fill(weights: Tensor, key: int) -> None:
            gen = torch.Generator().manual_seed(seed + key)
            values = torch.randn(weights.shape, generator=gen) / weights.shape[0] ** 0.5
            weights.copy_(values.to(device, weights.dtype))

        with torch.no_grad():
            fill(self.router.weight.T, 0)
            for i, expert in enumerate(self.dispatcher.local_expert_indices):
                fill(self.experts.up[i], 2 * expert + 1)
                fill(self.experts.down[i], 2 * expert + 2)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns routing_map bool [T, E], probs fp32 [T, E], zero off it."""
        scores = torch.softmax(self.router(x).float(), dim=-1)
        chosen = self.choose(scores)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        return routing_map, scores * routing_map

    def choose(self, scores: Tensor) -> Tensor:
        """Chooses a token's distinct experts: int64 [T, topk]."""
        return scores.topk(self.topk, dim=-1).indices

    def forward(self, x: Tensor) -> Tensor:
        dispatcher = self.dispatcher
        hidden, probs = dispatcher.dispatch_preprocess(x, *self.route(x))
        rows, row_probs = dispatcher.token_dispatch(hidden, probs)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        rows = self.experts(rows, counts, row_probs)
        hidden = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(hidden)
