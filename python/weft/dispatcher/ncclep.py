# SPDX-License-Identifier: Apache-2.0
"""The flex backend under the name of NCCL EP: top-k choices travel, rows arrive by expert, padded.
flex.py makes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import manager
from .by_expert import ByExpertManager
from .config import check_ncclep
from .manager import as_float32, chosen_experts

_TOKEN_ALIGNMENT = 64  # of the tokens in a budget


class _NCCLEPManager(ByExpertManager):
    """Any number of tokens on any rank, zero included, without a row budget; see `ByExpertManager`
    for those with one. A choice that the routing map does not have is sent nowhere, where the
    reference sends it at probability 0. moe_ncclep_zero_copy changes nothing: rows are written to
    their place in any case. Without moe_ncclep_static_shape, as in Megatron-Core 0.19, there is no
    row budget: experts get exactly the rows that carry a token, and padding.
    """

    drop_and_pad = False
    _MOST_TOKENS = (*ByExpertManager._MOST_TOKENS, "moe_ncclep_max_tokens_per_rank")

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
    ) -> None:
        """router_topk and num_experts count every TP rank.

        Raises ImportError without a dispatch function, ValueError for what `check_ncclep` refuses,
        for a row budget whose experts in FP8 or FP4 cannot run here, and for anything but bf16 on
        the wire.
        """
        if self._functions()[0] is None:
            raise ImportError("NCCL EP is not installed. (weft.fused_a2a has no nccl_ep_dispatch)")
        c = self._take(group, num_local_experts, router_topk, num_experts, config)
        has_budget = check_ncclep(c)
        if has_budget and (c.fp8 or c.fp4) and not c.moe_experts_ignore_unused_rows:
            _check_low_precision_experts()
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
            if getattr(c, name) != "bf16":
                raise ValueError(f"{name}: Weft does not quantise rows (expected 'bf16')")
        if not has_budget:
            self.moe_expert_rank_capacity_factor = None
        self.num_sms = c.moe_flex_dispatcher_num_sms or 0
        self.token_indices: Tensor | None = None
        # int64 [1] where the tokens are: the most rows that a call with a budget would have needed.
        self.required_recv: Tensor | None = None
        self._received: tuple[Any, ...] = ()  # the last rows' shape, dtype and device

    @property
    def _zc_bwd_token_buf(self) -> Tensor | None:
        """Returns memory, any, for the gradient of the last received rows, which Megatron-LM's
        schedule copies with moe_ncclep_zero_copy. None before a dispatch."""
        if not self._received:
            return None
        shape, dtype, device = self._received
        return torch.empty(shape, dtype=dtype, device=device)

    def _functions(self) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
        found = manager.backend("ncclep")
        return found.dispatch, found.combine

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        shape = (routing_map.shape[0], self.num_experts)
        routing_map, probs = routing_map.reshape(shape), probs.reshape(shape)
        token_probs, indices = chosen_experts(routing_map, probs, self.router_topk)
        self.setup_metadata_from_indices(indices, token_probs)

    def setup_metadata_from_indices(self, token_indices: Tensor, token_probs: Tensor) -> None:
        self.token_indices, self.token_probs = token_indices, token_probs
        self._most = -(-self._most_tokens(token_indices) // _TOKEN_ALIGNMENT) * _TOKEN_ALIGNMENT

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective, on the current stream: the two flags change nothing."""
        del async_finish, allocate_on_comm_stream
        from weft import fused_a2a

        budget, hidden = self._row_budget(), hidden_states.shape[1]
        sizes = (self._most, budget, hidden)
        fused_a2a.ensure_nccl_ep_bootstrapped(
            self.group, self.num_experts, *sizes, self.router_topk, self.num_sms
        )
        self.handle = fused_a2a.new_nccl_ep_buffer(
            self.router_topk, *sizes, self.num_local_experts, alignment=self.align_size
        )
        probs = as_float32(self.token_probs, "NCCL EP")
        self.token_probs = probs.detach()  # or the router's graph would live until the next pass
        self._num_tokens = hidden_states.shape[0]
        dispatch, _ = self._functions()
        rows, self.tokens_per_expert, self.dispatched_probs = dispatch(
            self.handle, hidden_states, self.token_indices, probs
        )
        self._received = (rows.shape, rows.dtype, rows.device)
        if budget is not None:
            total = self.handle.total_recv_tokens
            self._note_overflow(total > budget)
            before = self.required_recv
            is_first = before is None or before.device != total.device
            self.required_recv = total.clone() if is_first else torch.maximum(before, total)
        return rows

    def combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective, on the current stream: the two flags change nothing."""
        del async_finish, allocate_on_comm_stream
        _, combine = self._functions()
        tokens = combine(self.handle, hidden_states, num_local_tokens=self._num_tokens)
        self.handle = None
        self.dispatched_probs = self.dispatched_probs.detach()
        return tokens


def _check_low_precision_experts() -> None:
    """Raises ValueError unless Transformer Engine's grouped FP8 or FP4 experts that ignore unused
    rows can run."""
    from weft.compat import environment

    text = "ncclep: moe_expert_rank_capacity_factor with fp8 or fp4 needs"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10:
        raise ValueError(f"{text} a GPU of compute capability 10 or more")
    if environment.number("NVTE_CUTEDSL_FUSED_GROUPED_MLP", default=0, least=0) < 1:
        raise ValueError(f"{text} NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 in the environment")


def nccl_ep_release_context() -> None:
    """Closes the exchanges of "ncclep", on every rank before the process groups go; a later
    dispatch makes new ones."""
    from weft import fused_a2a

    fused_a2a.nccl_ep_finalize()
