# SPDX-License-Identifier: Apache-2.0
"""Common part of backends whose rows arrive by expert, padded, in one step: modes, row budgets and
their overflow. hybridep.py and ncclep.py are the backends."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import BadCall

from .capacity import get_align_size_for_quantization
from .config import Settings, option
from .manager import _DispatchManager

# The reference pads every rank's tokens to the largest number of any rank, so aligned, with either.
_UNEVEN = ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens")
_TOKEN_ALIGNMENT = 64


class ByExpertManager(_DispatchManager):
    """The rows of `dispatch` are the experts' input itself.

    A row budget (moe_expert_rank_capacity_factor) is a fixed number of rows with no wait for a GPU;
    what does not fit is dropped, and `over_budget` says so. The budget is
    T * (choices of a token, every TP rank counted) * factor. T is what all ranks bring. Where they
    bring different numbers, the largest must be told by moe_max_tokens_per_rank, or be asked for by
    the flags, at every call.
    """

    experts_read_received_rows = True

    # A subclass sets these.
    config: Any
    router_topk: int
    moe_expert_rank_capacity_factor: float | None
    drop_and_pad: bool
    align_size: int

    _MOST_TOKENS = ("moe_max_tokens_per_rank",)  # settings of the most T
    over_budget: Tensor | None = None  # bool [1] where the tokens are, over all calls
    _grown_budget = 0
    _most = 0  # tokens, see `_most_tokens`

    def _take(
        self, group: Any, num_local_experts: int, router_topk: int, num_experts: int, config: Any
    ) -> Settings:
        """Takes Megatron-LM's arguments. router_topk, num_experts count every TP rank."""
        settings = Settings(config)
        self.group = group
        self.config = config
        self.num_local_experts = num_local_experts
        self.router_topk = router_topk
        self.num_experts = num_experts
        self.moe_expert_rank_capacity_factor = settings.moe_expert_rank_capacity_factor
        self.align_size = get_align_size_for_quantization(config)
        return settings

    def get_dispatched_metadata(self) -> tuple[Tensor | None, Tensor | None]:
        return None, self.dispatched_probs

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def grow_recv_capacity(self, num_rows: int) -> None:
        """Row budgets are at least `num_rows` from now on.

        Raises BadCall (also an AssertionError and a ValueError) unless that is more than the last
        such number.
        """
        if num_rows <= self._grown_budget:
            raise BadCall(
                f"grow: {num_rows} rows are no growth (expected more than {self._grown_budget})"
            )
        self._grown_budget = num_rows

    def _most_tokens(self, routing: Tensor) -> int:
        """Returns the number of tokens for fixed sizes: the setting, or the most of any rank if a
        flag says so, as the reference pads (collective then, and waits for a GPU), or T."""
        num_tokens = routing.shape[0]
        given = max(option(self.config, name) or 0 for name in self._MOST_TOKENS)
        is_sized = self.drop_and_pad or self.moe_expert_rank_capacity_factor is not None
        if given or not is_sized or not any(option(self.config, name) for name in _UNEVEN):
            return max(num_tokens, given)
        most = torch.tensor([num_tokens], device=routing.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return -(-int(most.item()) // _TOKEN_ALIGNMENT) * _TOKEN_ALIGNMENT

    def _row_budget(self) -> int | None:
        factor = self.moe_expert_rank_capacity_factor
        if factor is None:
            return None
        rows = max(int(self._most * self.router_topk * factor), self._grown_budget)
        align = self.align_size or 1
        return -(-rows // align) * align

    def _note_overflow(self, overflow: Tensor) -> None:
        """Notes a call's bool [1]."""
        if self.over_budget is None or self.over_budget.device != overflow.device:
            self.over_budget = torch.zeros_like(overflow)
        self.over_budget |= overflow
