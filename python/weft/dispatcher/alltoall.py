# SPDX-License-Identifier: Apache-2.0
"""The token dispatcher over torch.distributed only, the reference for all others. permute.py orders
its rows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from .base import MoETokenDispatcher, rank_in, size_of
from .capacity import get_align_size_for_quantization, get_capacity, pad_routing_map
from .config import expect, option
from .permute import permute, sort_chunks_by_idxs, unpermute


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Permute, all-to-all over EP, gather over TP, sort by expert; and all of it backwards.

    Runs on any backend of torch.distributed that has an all-to-all with uneven splits, gloo on
    CPUs included. Rows reach the experts by local expert, then TP source rank, then EP source
    rank, then token. tokens_per_expert is int64 [El] on the CPU.

    Counts of routes come to the host once per forward, all together, so that a GPU is waited for
    there. Only drop-and-pad has sizes that are known beforehand: no wait, but T must be equal on
    all ranks. Tokens may have fewer routes than top-k in every mode; the reference counts T * K
    rows without a capacity factor, whatever the map says.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any,
    ) -> None:
        """local_expert_indices: this rank's experts, consecutive; EP rank r has the r-th share."""
        super().__init__(config, pg_collection)
        self._take_experts(num_local_experts, local_expert_indices)
        expect(
            self.num_experts == num_local_experts * self.ep_size,
            f"alltoall: {num_local_experts} local experts on {self.ep_size} ranks are not "
            f"num_moe_experts = {self.num_experts}",
        )
        self.drop_and_pad: bool = option(config, "moe_pad_expert_input_to_capacity")
        self.moe_expert_capacity_factor = option(config, "moe_expert_capacity_factor")
        expect(
            not self.drop_and_pad or self.moe_expert_capacity_factor is not None,
            "moe_pad_expert_input_to_capacity: needs moe_expert_capacity_factor",
        )
        self.capacity: int | None = None
        self.cudagraph_attrs = [
            "routing_map",
            "num_out_tokens",
            "input_splits",
            "output_splits",
            "output_splits_tp",
            "chunk_sizes",
            "tokens_per_expert",
            "reversed_local_input_permutation_mapping",
        ]
        # Chunks arrive by source, and inside a source by expert. chunk_order[i] is the place of
        # the i-th chunk by expert; back_order undoes that.
        sources, experts = range(self.tp_size * self.ep_size), range(num_local_experts)
        self.chunk_order = [s * len(experts) + e for e in experts for s in sources]
        self.back_order = [e * len(sources) + s for s in sources for e in experts]

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Collective. Sets the splits from bool [T, E]; returns tokens_per_expert."""
        shape = (self.ep_size, self.tp_size, self.num_experts)
        if self.drop_and_pad:
            self.capacity = get_capacity(
                routing_map.shape[0] * option(self.config, "moe_router_topk"),
                self.num_experts,
                self.moe_expert_capacity_factor,
            )
            counts = torch.full(shape, self.capacity, device="cpu")
        else:
            own = routing_map.sum(0, dtype=torch.int64)
            counts = gather_counts(own, self.tp_ep_group).cpu().reshape(shape)
        # counts[ep, tp, e]: routes of that source rank to expert e.
        first = self.local_expert_indices[0]
        here = counts[:, :, first : first + self.num_local_experts]
        own = counts[self.ep_rank, self.tp_rank]
        self.num_out_tokens = int(own.sum())
        self.input_splits = own.reshape(self.ep_size, self.num_local_experts).sum(1).tolist()
        self.output_splits = here[:, self.tp_rank].sum(1).tolist()
        self.output_splits_tp = here.sum((0, 2)).tolist()
        self.chunk_sizes = here.transpose(0, 1).reshape(-1)  # [TP * EP * El]
        return here.sum((0, 1))

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Collective. Permutes [..., H] to rows by expert [P, H] with probabilities [P]."""
        expect(probs.dim() == 2, "Expected 2D tensor for probs")
        expect(routing_map.dim() == 2, "Expected 2D tensor for token2expert mask")
        expect(routing_map.dtype == torch.bool, "Expected bool tensor for mask")
        tokens = self._flatten(hidden_states)
        if option(self.config, "moe_router_padding_for_quantization"):
            # The added routes must not weigh anything, and the caller keeps its map.
            probs = probs.masked_fill(~routing_map, 0)
            align = get_align_size_for_quantization(self.config)
            routing_map = pad_routing_map(routing_map.clone(), align)
        self.routing_map = routing_map
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.hidden_shape_before_permute = tokens.shape
        permuted = permute(
            tokens,
            routing_map,
            probs=probs,
            num_out_tokens=self.num_out_tokens,
            fused=option(self.config, "moe_permute_fusion"),
            drop_and_pad=self.drop_and_pad,
        )
        self.reversed_local_input_permutation_mapping = permuted.row_token
        return permuted.rows, permuted.probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Collective. Exchanges rows over EP, then their probabilities."""
        splits = self.output_splits, self.input_splits
        rows = all_to_all(hidden_states, self.ep_group, *splits)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, all_to_all(probs, self.ep_group, *splits)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective with TP. Returns rows [N, H] by expert, tokens_per_expert, probs [N]."""
        rows = gather_rows_of(hidden_states, self.tp_group, self.output_splits_tp)
        probs = gather_rows_of(probs, self.tp_group, self.output_splits_tp)
        self._probs_dtype = probs.dtype
        if self.num_local_experts > 1:
            rows, probs = sort_chunks_by_idxs(rows, self.chunk_sizes, self.chunk_order, probs)
        return rows, self.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Collective with TP. Reorders rows by expert [N, H] as they arrived."""
        rows = hidden_states
        if self.num_local_experts > 1:
            by_expert = self.chunk_sizes[self.chunk_order]
            rows, _ = sort_chunks_by_idxs(rows, by_expert, self.back_order)
        # At least fp32, so that partial results are rounded once; fp64 if the router wants it.
        sum_dtype = torch.promote_types(self._probs_dtype, torch.float32)
        return reduce_scatter_rows(rows, self.tp_group, self.output_splits_tp, sum_dtype)

    def token_combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Collective. Returns rows over EP to their source ranks. The flags change nothing."""
        del async_finish, allocate_on_comm_stream
        rows = all_to_all(hidden_states, self.ep_group, self.input_splits, self.output_splits)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums rows to tokens in the input's shape; adds the shared experts' output."""
        tokens = unpermute(
            hidden_states,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.routing_map,
            fused=option(self.config, "moe_permute_fusion"),
            drop_and_pad=self.drop_and_pad,
        )
        return self._restore(tokens)


# Exchanges of rows with gradients. Each is one all-to-all with uneven splits, which gloo, NCCL and
# MPI have. How long a call waits is set with the process group.


def all_to_all(
    rows: Tensor, group: Any, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Tensor:
    """Collective. Sends input_splits[r] of the rows [sum(input_splits), ...] to rank r, in order.

    Returns [sum(output_splits), ...], by source rank. Differentiable: the backward is this with the
    splits swapped.
    """
    if size_of(group) == 1:
        return rows
    out = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    splits = list(output_splits), list(input_splits)
    return all_to_all_single(out, rows.contiguous(), *splits, group=group)


def gather_rows_of(rows: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    """Collective. Gathers all ranks' rows, sizes[r] of rank r, by rank. Differentiable."""
    num_ranks = size_of(group)
    if num_ranks == 1:
        return rows
    copies = rows.repeat(num_ranks, *[1] * (rows.dim() - 1))
    return all_to_all(copies, group, sizes, [rows.shape[0]] * num_ranks)


def reduce_scatter_rows(
    rows: Tensor, group: Any, sizes: Sequence[int], sum_dtype: torch.dtype
) -> Tensor:
    """Collective. The adjoint of `gather_rows_of`: sums over ranks, ascending, in `sum_dtype`.

    rows [sum(sizes), H] -> [sizes[own rank], H] in the dtype of `rows`. Differentiable.
    """
    num_ranks = size_of(group)
    if num_ranks == 1:
        return rows
    own = sizes[rank_in(group)]
    parts = all_to_all(rows, group, [own] * num_ranks, sizes)
    parts = parts.reshape(num_ranks, own, *rows.shape[1:])
    total = parts[0].to(sum_dtype)
    for part in parts[1:]:
        total = total + part.to(sum_dtype)
    return total.to(rows.dtype)


def gather_counts(counts: Tensor, group: Any) -> Tensor:
    """Collective. Gathers int64 [E] of each rank: [R * E]."""
    if size_of(group) == 1:
        return counts
    gathered = counts.new_empty(size_of(group) * counts.shape[0])
    dist.all_gather_into_tensor(gathered, counts.contiguous(), group=group)
    return gathered
