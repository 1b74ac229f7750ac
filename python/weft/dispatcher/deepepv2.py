# SPDX-License-Identifier: Apache-2.0
"""The flex backend under the name of DeepEP V2: that of DeepEP, on an elastic buffer where rows are
permuted. flex.py makes it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import manager
from .config import option
from .deepep import _DeepepManager


class _DeepepV2Manager(_DeepepManager):
    """Does what `_DeepepManager` does, rows by expert included, which need no elastic buffer.

    Where a permute is needed, the ranks must know the largest number of tokens of any of them:
    moe_max_tokens_per_rank says it, the same on all ranks; without, every dispatch asks for it,
    which waits for a GPU. The reference takes each rank's own number for it.
    """

    def __init__(
        self,
        group: Any,
        router_topk: int,
        num_experts: int,
        num_local_experts: int,
        config: Any,
        moe_router_expert_pad_multiple: int | None = None,
    ) -> None:
        """router_topk and num_experts: times the TP size.

        Raises ImportError if DeepEP V2 is missing, ValueError for drop-and-pad.
        """
        functions = manager.backend("deepepv2")
        if functions.dispatch is None:
            raise ImportError(
                "DeepEP V2 is not installed. (weft.fused_a2a has no deepepv2_dispatch)"
            )
        pair = {"dispatch": self._dispatch_rows, "combine": self._combine_rows}
        by_expert = functions.by_expert
        super().__init__(
            group,
            router_topk,
            num_experts=num_experts,
            num_local_experts=num_local_experts,
            moe_router_expert_pad_multiple=moe_router_expert_pad_multiple,
            _dispatch_fn=pair["dispatch"],
            _combine_fn=pair["combine"],
            config=config,
            _by_expert=None if by_expert is None else by_expert._replace(**pair),
        )
        self._buffer: Any = None

    def _dispatch_rows(
        self,
        x: Tensor,
        token_indices: Tensor,
        token_probs: Tensor,
        num_experts: int,
        group: Any,
        **streams: bool,
    ) -> tuple[Any, ...]:
        from weft import fused_a2a

        most = self._most_tokens(x)
        sizes = (most, x.shape[1], token_indices.shape[1])
        self._buffer = fused_a2a.get_elastic_buffer(group, *sizes)
        routing = (token_indices, token_probs, num_experts, most)
        dispatch = manager.backend("deepepv2").dispatch
        return dispatch(self._buffer, x, *routing, num_sms=self.num_sms, **streams)

    def _combine_rows(self, x: Tensor, _group: Any, handle: Any, **streams: bool) -> tuple:
        combine = manager.backend("deepepv2").combine
        return combine(self._buffer, x, handle, num_sms=self.num_sms, **streams)

    def _most_tokens(self, x: Tensor) -> int:
        """Returns the most tokens of any rank, at least 1. Collective unless a setting says it."""
        given = option(self.config, "moe_max_tokens_per_rank")
        if given:
            return given
        most = torch.tensor([max(x.shape[0], 1)], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most.item())
