# SPDX-License-Identifier: Apache-2.0
"""The flex backend of HybridEP: rows arrive by expert, padded, in one step. flex.py makes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import manager
from .by_expert import ByExpertManager
from .capacity import FixedCapacity, get_align_size_for_quantization, limit_to_capacity
from .config import Settings, num_sms
from .manager import as_float32, indices_to_multihot


class _HybridEPMetadataProcessor(torch.nn.Module):
    """Top-k choices to flags: int64 and float [T, K] -> bool [T, E], fp32 [T, E]; -1 is dropped.

    With compact_routing the choices themselves stand in place of the flags.
    """

    def __init__(
        self, num_experts: int, permute_fusion: bool = False, compact_routing: bool = False
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.permute_fusion = permute_fusion  # changes nothing
        self.compact_routing = compact_routing

    def forward(self, token_indices: Tensor, token_probs: Tensor) -> tuple[Tensor, Tensor]:
        probs = token_probs.float()
        routing_map, probs = indices_to_multihot(token_indices, probs, self.num_experts)
        return token_indices if self.compact_routing else routing_map, probs


class _HybridEPManager(ByExpertManager):
    """Any number of tokens on any rank, zero included: counts travel with the tokens, so there is
    no padding, and in the exact mode no all-reduce for a maximum and no wait for it, whatever the
    flags that ask the reference for that padding say. Input that is padded already works.

    Three modes. Exact: as many rows as arrive. Row budget: see `ByExpertManager`; the reference
    forgets the TP ranks, which makes the budget TP times too small. Fixed capacity (drop-and-pad):
    see `FixedCapacity`; T is the same there as with a row budget.
    """

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        num_experts: int,
        router_topk: int | None = None,
        permute_fusion: bool = False,
        moe_hybridep_num_sms: int | None = 24,
        moe_hybridep_permute_fusion: bool = False,
        moe_hybridep_compact_routing: bool = False,
        moe_hybridep_num_sms_preprocessing: int | None = None,
        moe_hybridep_num_blocks_permute: int | None = None,
        moe_hybridep_num_blocks_unpermute: int | None = None,
        benchmark_static_routing: bool = False,
        *,
        config: Any = None,
        _dispatch_fn: Callable[..., Any] | None = None,
        _combine_fn: Callable[..., Any] | None = None,
    ) -> None:
        """NeMo Automodel's arguments; with `config`, Megatron-LM's: group, num_local_experts and
        num_experts, everything else from the config.

        router_topk and num_experts count every TP rank. `_dispatch_fn` and `_combine_fn` take the
        place of hybrid_ep_dispatch and hybrid_ep_combine. benchmark_static_routing: the first
        dispatch's number of rows is the row budget of all others.
        Raises ImportError without a dispatch function, ValueError for drop-and-pad without a
        capacity factor.
        """
        if router_topk is not None and not isinstance(router_topk, int):
            config, router_topk = router_topk, None  # Megatron-LM's fourth argument
        self._given = (_dispatch_fn, _combine_fn)
        if self._functions()[0] is None:
            raise ImportError(
                "HybridEP is not installed. (weft.fused_a2a has no hybrid_ep_dispatch)"
            )
        self.group = group
        self.config = config
        self.num_local_experts = num_local_experts
        self.num_experts = num_experts
        self.router_topk = router_topk
        self.permute_fusion = permute_fusion
        self.moe_hybridep_num_sms = moe_hybridep_num_sms
        self.moe_hybridep_permute_fusion = moe_hybridep_permute_fusion
        self.moe_hybridep_compact_routing = moe_hybridep_compact_routing
        self.moe_hybridep_num_sms_preprocessing = moe_hybridep_num_sms_preprocessing
        self.moe_hybridep_num_blocks_permute = moe_hybridep_num_blocks_permute
        self.moe_hybridep_num_blocks_unpermute = moe_hybridep_num_blocks_unpermute
        self.benchmark_static_routing = benchmark_static_routing
        self.moe_expert_rank_capacity_factor: float | None = None
        self.drop_and_pad = False
        self.align_size = 0
        if config is not None:
            self._read(config)

        self.routing_map: Tensor | None = None
        self.token_indices: Tensor | None = None  # in its place with compact routing
        self.num_permuted_tokens: int | None = None
        self.pad_multiple: int | None = None if self.drop_and_pad else self.align_size or None
        self._static_num_permuted_tokens: int | None = None
        self._fixed: FixedCapacity | None = None

    def _read(self, config: Any) -> None:
        c = Settings(config)
        if self.router_topk is None:
            self.router_topk = self.num_experts // config.num_moe_experts * c.moe_router_topk
        self.permute_fusion = c.moe_permute_fusion
        self.moe_hybridep_num_sms = num_sms(config, "moe_hybridep_num_sms")
        self.moe_expert_rank_capacity_factor = c.moe_expert_rank_capacity_factor
        self.align_size = get_align_size_for_quantization(config)
        self.drop_and_pad = c.moe_pad_expert_input_to_capacity
        self.capacity_factor = c.moe_expert_capacity_factor
        if self.drop_and_pad and self.capacity_factor is None:
            raise ValueError(
                "moe_pad_expert_input_to_capacity: there is no capacity to pad to "
                "(set moe_expert_capacity_factor)"
            )
        is_fused = c.moe_permute_fusion_into_hybridep or c.moe_hybridep_permute_fusion
        self.moe_hybridep_permute_fusion = is_fused
        self.moe_hybridep_compact_routing = c.moe_hybridep_compact_routing
        self.moe_hybridep_num_sms_preprocessing = c.moe_hybridep_num_sms_preprocessing
        self.moe_hybridep_num_blocks_permute = c.moe_hybridep_num_blocks_permute
        self.moe_hybridep_num_blocks_unpermute = c.moe_hybridep_num_blocks_unpermute
        self.benchmark_static_routing = c.moe_benchmark_static_routing

    def _functions(self) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
        """Picks the functions."""
        dispatch, combine = self._given
        if dispatch is None or combine is None:
            functions = manager.backend("hybridep")
            dispatch, combine = dispatch or functions.dispatch, combine or functions.combine
        return dispatch, combine

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        shape = (routing_map.shape[0], self.num_experts)
        self.setup_routing(routing_map.reshape(shape).bool(), probs.reshape(shape))

    def setup_metadata_from_indices(self, token_indices: Tensor, token_probs: Tensor) -> None:
        self.setup_routing(*self._indices_to_multihot(token_indices, token_probs))

    def _indices_to_multihot(self, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return indices_to_multihot(indices, probs.float(), self.num_experts)

    def setup_routing(self, routing: Tensor, probs: Tensor) -> None:
        """Takes what `_HybridEPMetadataProcessor` returns: flags, or choices where they are compact
        (not with drop-and-pad)."""
        self._most = self._most_tokens(routing)
        if self.drop_and_pad:
            self._fixed = FixedCapacity(self, self._most)
            routing = limit_to_capacity(routing, probs, self._fixed.per_source)
        is_map = routing.dtype == torch.bool
        self.routing_map, self.token_indices = (routing, None) if is_map else (None, routing)
        self.token_probs = probs

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective, on the current stream: the two flags change nothing."""
        del async_finish, allocate_on_comm_stream
        # Computed anew each time: activation checkpointing dispatches twice before one combine.
        self.pad_multiple = self.align_size or None
        budget = self._row_budget()
        if budget is None and self.benchmark_static_routing:
            budget = self._static_num_permuted_tokens
        if self._fixed is not None:
            self.pad_multiple, budget = None, self._fixed.num_rows
        probs = as_float32(self.token_probs, None if self.config is None else "HybridEP")
        self.token_probs = probs.detach()  # or the router's graph would live until the next pass
        dispatch, _ = self._functions()
        rows, self.dispatched_probs, _, counts, self.handle = dispatch(
            x=hidden_states,
            routing_map=self.routing_map,
            probs=probs,
            group=self.group,
            num_local_experts=self.num_local_experts,
            num_sms_dispatch_api=self.moe_hybridep_num_sms,
            num_sms_combine_api=self.moe_hybridep_num_sms,
            num_permuted_tokens=budget,
            pad_multiple=self.pad_multiple,
            **self._choices(),
        )
        if budget is not None:
            self._note_overflow(self.handle[-1] != 0)
        self.tokens_per_expert = counts.to(torch.int64)
        # The rows say how many there are; the sum of the counts could be on a GPU.
        self.num_permuted_tokens = rows.shape[0]
        if self._static_num_permuted_tokens is None:
            self._static_num_permuted_tokens = rows.shape[0]
        if self._fixed is not None:
            rows, self.dispatched_probs = self._fixed.spread(
                rows, self.dispatched_probs, self.tokens_per_expert
            )
            self.tokens_per_expert = self._fixed.tokens_per_expert
        return rows

    def combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective, on the current stream: the two flags change nothing."""
        del async_finish, allocate_on_comm_stream
        if self._fixed is not None:
            hidden_states = self._fixed.gather_back(hidden_states)
        is_fused = {"fused": True} if self.moe_hybridep_permute_fusion else {}
        _, combine = self._functions()
        tokens = combine(
            x=hidden_states,
            handle=self.handle,
            num_permuted_tokens=self.num_permuted_tokens,
            pad_multiple=self.pad_multiple,
            **is_fused,
        )
        self.handle = self.num_permuted_tokens = None
        self.dispatched_probs = self.dispatched_probs.detach()
        self._fixed = None
        return tokens

    def _choices(self) -> dict[str, Any]:
        """Returns the dispatch function's further arguments that are set."""
        choices = {
            "fused": self.moe_hybridep_permute_fusion or None,
            "topk_idx": self.token_indices,
            "num_experts": None if self.token_indices is None else self.num_experts,
            "num_sms_preprocessing_api": self.moe_hybridep_num_sms_preprocessing,
            "num_blocks_permute": self.moe_hybridep_num_blocks_permute,
            "num_blocks_unpermute": self.moe_hybridep_num_blocks_unpermute,
        }
        return {name: value for name, value in choices.items() if value is not None}

    def initialize_runtime(
        self, *, num_tokens: int, hidden_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Collective. Sends `num_tokens` made-up tokens through a forward and a backward, so that
        nothing is left to be made by the first ones of a model. The manager is as before then.

        Raises ValueError unless both sizes are positive, TypeError for a dtype that is no float.
        """
        for name, size in (("num_tokens", num_tokens), ("hidden_dim", hidden_dim)):
            if size <= 0:
                raise ValueError(f"{name} must be positive, got {size}")
        if not dtype.is_floating_point:
            raise TypeError(f"HybridEP hidden dtype must be floating point, got {dtype}")
        before = vars(self).copy()
        self.over_budget = None  # this call's own
        try:
            # A validation loop may have gradients switched off.
            with torch.inference_mode(False), torch.enable_grad():
                choice = torch.arange(num_tokens * self.router_topk, device=device)
                indices = (choice % self.num_experts).unflatten(0, (num_tokens, self.router_topk))
                probs = torch.full(indices.shape, 1 / self.router_topk, device=device)
                routing, probs = self._indices_to_multihot(indices, probs)
                is_compact = self.moe_hybridep_compact_routing and not self.drop_and_pad
                self.setup_routing(indices if is_compact else routing, probs.requires_grad_())
                shape = (num_tokens, hidden_dim)
                x = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
                rows = self.dispatch(x)
                row_probs = self.dispatched_probs.unsqueeze(1).to(rows.dtype)
                self.combine(rows * row_probs).float().sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            vars(self).clear()
            vars(self).update(before)
