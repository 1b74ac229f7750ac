# SPDX-License-Identifier: Apache-2.0
"""The flex backend of DeepEP and UCCL-EP: one row per token and rank travels, and is permuted.
flex.py makes it, permute.py permutes."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import manager
from .capacity import get_align_size_for_quantization, pad_routing_map
from .config import Settings, expect, num_sms
from .manager import _DispatchManager, as_float32, chosen_experts, indices_to_multihot
from .permute import permute, unpermute

_logger = logging.getLogger(__name__)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # rows that combine can sum


class _DeepepManager(_DispatchManager):
    """Any number of tokens on any rank, zero included; nothing is padded on the way.

    Differs from the references where they go wrong: a choice that the routing map does not have
    (a masked token, a dropped one) is sent nowhere, with or without a capacity factor; and
    padding of the router is left out where there are too few rows for it, in both families.

    On Weft's own functions rows arrive by expert, so that permute and unpermute are views, with the
    same bits; the received rows are the experts' then, each with one choice (K' is 1). Not with
    padding of the router, which repeats received rows, nor under Megatron-LM's schedule of
    overlap_moe_expert_parallel_comm, which frees them while the experts still need theirs, nor with
    other dtypes than bf16, fp16 and fp32. The work is on the current stream then, whatever the
    flags of `dispatch` and `combine`.
    """

    def __init__(
        self,
        group: Any,
        router_topk: int,
        permute_fusion: bool = False,
        capacity_factor: float | None = None,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        router_dtype: str | None = None,
        moe_router_expert_pad_multiple: int | None = None,
        _dispatch_fn: Callable[..., Any] | None = None,
        _combine_fn: Callable[..., Any] | None = None,
        *,
        config: Any = None,
        _by_expert: Any = None,
    ) -> None:
        """NeMo Automodel's arguments; with `config`, Megatron-LM's: group, router_topk,
        num_experts and num_local_experts by keyword, everything else from the config.

        router_topk and num_experts count every TP rank. `_dispatch_fn` and `_combine_fn` take the
        place of fused_dispatch and fused_combine; `_by_expert` does their work and the permute's
        in one step, as long as they are the functions that it stands for.
        Raises ImportError without a dispatch function, ValueError for drop-and-pad.
        """
        if _dispatch_fn is None or _combine_fn is None:
            functions = manager.backend("deepep")
            _dispatch_fn = _dispatch_fn or functions.dispatch
            _combine_fn = _combine_fn or functions.combine
            _by_expert = _by_expert or functions.by_expert
        if _dispatch_fn is None:
            raise ImportError(
                "Neither DeepEP nor UCCL-EP is installed. (weft.fused_a2a has no fused_dispatch)"
                if config is None
                else "DeepEP is not installed. (weft.fused_a2a has no fused_dispatch)"
            )
        self._fused_dispatch, self._fused_combine = _dispatch_fn, _combine_fn
        self._by_expert = _by_expert
        self.group = group
        self.config = config
        self.router_topk = router_topk
        self.num_experts = num_experts
        self.num_local_experts = num_local_experts
        self.permute_fusion = permute_fusion
        self.capacity_factor = capacity_factor
        self.router_dtype = router_dtype
        self.align_size = 0  # row multiple of experts, to which a fused permute pads
        self.pad_multiple = moe_router_expert_pad_multiple  # of the routing map
        self.num_sms = 0  # of an exchange by expert; 0: Weft's table
        self._keeps_received_rows = True  # until the backward
        if config is not None:
            self._read(config)
        self.token_indices: Tensor | None = None
        self._forget()

    def _forget(self) -> None:
        """Drops what a dispatch leaves for its combine."""
        self.handle = self.dispatched_probs = self._indices = None
        self._arrives_by_expert = False
        self.dispatched_routing_map = self.reversed_mapping_for_combine = self.pad_offsets = None

    def _read(self, config: Any) -> None:
        c = Settings(config)
        if c.moe_pad_expert_input_to_capacity:
            raise ValueError(
                "moe_pad_expert_input_to_capacity: this flex backend has no fixed sizes "
                "(use 'hybridep' or the alltoall dispatcher)"
            )
        self.permute_fusion = c.moe_permute_fusion
        self.capacity_factor = c.moe_expert_capacity_factor
        self.router_dtype = c.moe_router_dtype
        self.align_size = get_align_size_for_quantization(config)
        self.num_sms = num_sms(config, "moe_deepep_num_sms") or 0
        self._keeps_received_rows = not c.overlap_moe_expert_parallel_comm
        if c.moe_router_padding_for_quantization:
            self.pad_multiple = self.align_size

    def setup_metadata(self, routing_map: Tensor | int, probs: Tensor) -> None:
        """Takes Megatron-LM's routing map and probs [T, G, El], or NeMo Automodel's T and probs;
        probability 0 is no choice then."""
        has_map = isinstance(routing_map, torch.Tensor)
        shape = (probs.shape[0] if has_map else routing_map, self.num_experts)
        routing_map = routing_map.reshape(shape) if has_map else None
        self.token_probs, self.token_indices = chosen_experts(
            routing_map, probs.reshape(shape), self.router_topk
        )

    def setup_metadata_from_indices(self, token_indices: Tensor, token_probs: Tensor) -> None:
        self.token_indices, self.token_probs = token_indices, token_probs

    def dispatch(
        self,
        hidden_states: Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tensor:
        probs = as_float32(self.token_probs, None if self.config is None else "DeepEP")
        self.token_probs = probs.detach()  # or the router's graph would live until the next pass
        self._forget()
        tokens = (hidden_states, self.token_indices, probs, self.num_experts, self.group)
        if self.experts_read_received_rows and hidden_states.dtype in _FLOATS:
            pad_multiple = self.align_size if self.permute_fusion and self.align_size else 1
            rows, self.dispatched_probs, *rest = self._by_expert.dispatch_by_expert(
                *tokens, pad_multiple=pad_multiple, num_sms=self.num_sms
            )
            self._arrives_by_expert = True
        else:
            rows, self._indices, self.dispatched_probs, *rest = self._fused_dispatch(
                *tokens,
                async_finish=async_finish,
                allocate_on_comm_stream=allocate_on_comm_stream,
            )
        self.tokens_per_expert, self.handle = rest
        return rows

    @property
    def experts_read_received_rows(self) -> bool:
        own = self._by_expert
        return (
            own is not None
            and (self._fused_dispatch, self._fused_combine) == (own.dispatch, own.combine)  # still
            and self._keeps_received_rows
            and not self.pad_multiple
        )

    @property
    def dispatched_indices(self) -> Tensor | None:
        """int64 [N, K']: local experts of each received row, -1 for none. None after combine."""
        if self._indices is None and self._arrives_by_expert:
            self._indices = self.handle.local_experts
        return self._indices

    def get_dispatched_metadata(self) -> tuple[Tensor | None, Tensor | None]:
        return self.dispatched_indices, self.dispatched_probs

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if self._arrives_by_expert:
            return hidden_states, self._row_probs(self.dispatched_probs.reshape(-1))
        routing_map, probs = self._indices_to_multihot(
            self.dispatched_indices, self.dispatched_probs
        )
        if self.pad_multiple:
            routing_map = self._pad(routing_map)
        expect(probs.dtype == torch.float32, "DeepEP only supports float32 probs")
        self.dispatched_routing_map = routing_map
        self.hidden_shape_before_permute = hidden_states.shape
        permuted = permute(
            hidden_states,
            routing_map,
            probs=probs,
            num_out_tokens=int(self.tokens_per_expert.sum()),  # on the CPU: no wait
            fused=self.permute_fusion,
            tokens_per_expert=self.tokens_per_expert,
            align_size=self.align_size,
        )
        self.reversed_mapping_for_combine = permuted.row_token
        self.pad_offsets = permuted.pad_offsets
        if permuted.tokens_per_expert is not None:
            self.tokens_per_expert = permuted.tokens_per_expert
        return permuted.rows, self._row_probs(permuted.probs)

    def _indices_to_multihot(self, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return indices_to_multihot(indices, probs, self.num_local_experts)

    def _row_probs(self, probs: Tensor) -> Tensor:
        return probs.double() if self.router_dtype == "fp64" else probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        if self._arrives_by_expert:
            return hidden_states
        return unpermute(
            hidden_states,
            self.reversed_mapping_for_combine,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.dispatched_routing_map,
            fused=self.permute_fusion,
            pad_offsets=self.pad_offsets,
        )

    def combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tensor:
        if self._arrives_by_expert:
            tokens = self._by_expert.combine_by_expert(hidden_states, self.handle)
        else:
            tokens, _ = self._fused_combine(
                hidden_states,
                self.group,
                self.handle,
                async_finish=async_finish,
                allocate_on_comm_stream=allocate_on_comm_stream,
            )
        self._forget()
        return tokens

    def _pad(self, routing_map: Tensor) -> Tensor:
        """Adds rows of probability 0 until counts are multiples, if there are enough rows."""
        counts = -(-self.tokens_per_expert // self.pad_multiple) * self.pad_multiple
        if counts.numel() and int(counts.max()) > routing_map.shape[0]:
            _logger.warning(
                "Not enough tokens to pad. (%d rows, multiples of %d: left to the experts)",
                routing_map.shape[0],
                self.pad_multiple,
            )
            return routing_map
        self.tokens_per_expert = counts
        return pad_routing_map(routing_map, self.pad_multiple)
