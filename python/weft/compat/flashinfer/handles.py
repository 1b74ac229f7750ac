# SPDX-License-Identifier: Apache-2.0
"""Bases of the handles of a fleet that `register` makes: each is for a dispatch and its combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.compat.deep_ep.checks import INTEGERS, check
from weft.compat.deep_ep.hooks import Hook
from weft.compat.nixl_ep.buffer import NixlHandle

from .rows import FlatRows, ReceivedRows

if TYPE_CHECKING:
    from .fleet import Fleet


class FleetHandle:
    """One dispatch and its combine, in layout EXPERT_MAJOR. With HandleAlgoKnobSplitOperation their
    results may be read after `complete`."""

    dispatch_class: Any  # FlashInfer's `DispatchOutput`
    combine_class: Any  # its `CombineOutput`

    def __init__(self, fleet: Fleet, params: Any, algo_knobs: Sequence[Any] = ()) -> None:
        knobs = by_name(algo_knobs)
        self._fleet, self._ids = fleet, params.topk_ids
        self._weights = getattr(knobs.get("HandleAlgoKnobTopKWeights"), "weights", None)
        self._is_staged = "HandleAlgoKnobSplitOperation" in knobs
        self._handle: NixlHandle | ReceivedRows | None = None
        self._hook: Hook | None = None

    def update(self, params: Any) -> None:
        """Sets the next dispatch's routing, of the same shape. A CUDA graph keeps its capture's
        memory: write into that."""
        ids, old = params.topk_ids, self._ids
        shapes = f"{list(ids.shape)} (expected {list(old.shape)})"
        check(ids.shape == old.shape, f"update: topk_ids has shape {shapes}")
        self._ids = ids

    def dispatch(self, params: Any) -> Any:
        """Collective. Sends params.x[0] bf16 [T, H] to [El, capacity * max_tokens_per_rank, H]."""
        fleet = self._fleet
        rows, counts, self._handle, _, self._hook = fleet.buffer.dispatch(
            params.x[0],
            self._ids,
            fleet.params.max_tokens_per_rank,
            fleet.params.num_experts,
            use_fp8=fleet.use_fp8,
            round_scale=fleet.use_ue8m0,
            use_ue8m0=fleet.use_ue8m0,
            return_recv_hook=self._is_staged,
        )
        rows, scales = rows if isinstance(rows, tuple) else (rows, None)
        return self.dispatch_class(
            expert_tensors=rows,
            num_tokens=rows.size(1),
            expert_counts=counts,
            expert_scales=scales,
        )

    def combine(self, params: Any) -> Any:
        """Collective. Sums params.x[0], bf16 like the blocks, times HandleAlgoKnobTopKWeights into
        [T, H]; in params.out if given."""
        check(self._weights is not None, "combine without HandleAlgoKnobTopKWeights")
        combined, _, self._hook = self._fleet.buffer.combine(
            params.x[0],
            self._ids,
            self._weights,
            self._handle,
            return_recv_hook=self._is_staged,
            out=params.out,
        )
        return self.combine_class(x=combined)

    def complete(self) -> None:
        """Makes the current stream wait for the last call."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()

    def destroy(self) -> None:
        self._handle = self._hook = None


class RowsHandle(FleetHandle):
    """For layout RANK_MAJOR and algorithm HIGH_THROUGHPUT, which send a token once to each rank.
    Calls are complete at once, with HandleAlgoKnobSplitOperation too."""

    def __init__(self, fleet: Fleet, params: Any, algo_knobs: Sequence[Any] = ()) -> None:
        super().__init__(fleet, params, algo_knobs)
        knob = by_name(algo_knobs).get("HandleAlgoKnobNumReceivedTokens")
        is_flat = isinstance(fleet.buffer, FlatRows)
        self._total = knob.target if knob is not None and is_flat else None
        if self._total is not None:
            found = f"{self._total.dtype} {list(self._total.shape)}"
            is_good = self._total.dtype in INTEGERS and self._total.numel() > 0
            check(
                is_good, f"HandleAlgoKnobNumReceivedTokens: {found} (expected int32 or int64 [1])"
            )

    def dispatch(self, params: Any) -> Any:
        """Collective. Sends params.x[0] [T, any] to rows [R, max_tokens_per_rank, any], each with
        its token's choices, as this rank's experts or -1, and their weights. RANK_MAJOR: a block
        has one source's tokens, counted in expert_counts; HIGH_THROUGHPUT: all tokens come first,
        counted in the target of HandleAlgoKnobNumReceivedTokens."""
        fleet, sizes = self._fleet, self._fleet.sizes
        got = fleet.buffer.dispatch_rows(params.x[0], self._ids, self._weights, sizes)
        self._handle = got
        is_flat = isinstance(fleet.buffer, FlatRows)
        if self._total is not None:
            self._total[(0,) * self._total.dim()] = got.counts[0]
        return self.dispatch_class(
            expert_tensors=got.x.view(sizes.num_ranks, sizes.most, -1),
            num_tokens=sizes.num_rows,
            recv_topk_idx=got.experts,
            recv_topk_weights=got.weights,
            expert_counts=None if is_flat else got.counts,
            recv_total_counter=self._total,
        )

    def combine(self, params: Any) -> Any:
        """Collective. Sums params.x[0] (bf16, fp16, fp32, like the rows, each already the weighted
        sum over this rank's experts) over ranks into [T, H]; in params.out if given."""
        combined = self._fleet.buffer.combine_rows(self._handle, params.x[0], params.out)
        return self.combine_class(x=combined)


def by_name(knobs: Sequence[Any]) -> dict[str, Any]:
    """Returns the knobs by the names of their classes; the last one of a class counts."""
    return {type(knob).__name__: knob for knob in knobs}
