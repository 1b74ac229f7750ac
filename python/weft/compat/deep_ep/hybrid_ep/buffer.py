# SPDX-License-Identifier: Apache-2.0
"""`HybridEPBuffer`: the interface of `deep_ep`'s hybrid-ep branch, on Weft exchanges.

Same names, arguments, results and row order. What Weft lifts:

* Any number of tokens, another one on every rank, none included; no multiple of 64. Row bytes need
  only be a multiple of 16; there is no largest token count, and no rule about chunks, probability
  rows or pipeline stages, which `deep_ep` needs for its bulk copies and network queues.
* topk_idx may contain -1 (no route) anywhere; other numbers outside [0, E) are refused.
* combine takes bf16, fp16 and fp32, and inputs need not be contiguous.
* The overflow flag, item -1 of a permuted handle, is always defined.
* A handle remembers its number of rows, so that reuse does not need num_permuted_tokens, and
  dropped rows are no trouble for it: they come back as zeros.

"Fused" and unfused are the same code here, since rows are written once, to their final place,
either way; the arguments are accepted. Results carry no gradient, as with `deep_ep`.
"""

from typing import Any

import torch
from torch import Tensor

from weft import Dispatched, Plan

from ..checks import check, check_handle
from ..layout import scatter_columns
from ..payload import (
    numbers,
    received_numbers,
    received_topk,
    send_beside,
    topk_of_map,
)
from .handle import HybridEPHandle, PermuteHandle, PlainHandle
from .routing import count_of, is_bytes, routing_of, scales_of
from .setup import HybridEPSetup, warn_deprecated


class HybridEPBuffer(HybridEPSetup):
    """Moves tokens to the ranks of their experts and back, with or without grouping by expert.

    Collective, as are all its calls that move tokens; on a GPU they are queued on the current
    stream. group: the ranks, in whose order experts lie. max_num_of_tokens_per_rank: a capacity to
    begin with. Counts of SMs are those a call may occupy, None or 0: by Weft's measured table; of
    the others, num_sms_preprocessing_api and the block counts have no meaning here. The last two
    arguments are deprecated.
    """

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        handle: PermuteHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, PermuteHandle]:
        """Collective. Tokens to their experts, one row per route, grouped by local expert.

        hidden [T, H] bf16, fp16 or fp32, or a one-byte dtype (FP8) with scaling_factor
        [T, H / 128]. routing_map bool [T, E] with probs fp32 [T, E] or None; or topk_idx [T, K]
        with topk_weights fp32 [T, K] or None and num_of_experts; or the handle of an earlier call,
        whose routing is used again, with or without probs.
        pad_multiple: rows of an expert are rounded up to it; None and 0: not.

        Returns (rows, probs, scaling_factor, tokens_per_expert, handle):
        rows [P, H]: by expert, then source rank, then token; padding rows zero;
        probs fp32 [P] and scaling_factor [P, H / 128], zero in padding; None if not given (scaling
        factors: nor with a wider dtype);
        tokens_per_expert int64 [El]: rows of each expert, padding included; None with a handle.

        Blocking: P is what is needed, or num_permuted_tokens, which must be enough (else every
        rank raises); tokens_per_expert lies on the host (pinned on a machine with GPUs).
        non_blocking: P is num_permuted_tokens, a multiple of pad_multiple; no wait for a GPU, so
        that the call can be captured; tokens_per_expert lies beside the rows. What does not fit
        is dropped, later experts and later rows first; handle[-1], int32 [1], is then 1.
        Rows past the last expert's are uninitialised in either mode, probs too.
        With a handle P is its number of rows; num_permuted_tokens must be that or None. One on a
        GPU is not read, which would wait.
        Without waiting a GPU cannot learn of another rank's T: one above the buffer's capacity must
        then be the same on all ranks (`update_template_config` raises the capacity beforehand).
        Raises InvalidArgument (also an AssertionError).
        """
        verb = "dispatch_with_permute"
        if num_dispatched_tokens is not None:
            warn_deprecated(verb, "num_dispatched_tokens")
        if use_host_meta is not None:
            warn_deprecated(verb, "use_host_meta", "read as: not non_blocking")
            non_blocking = not use_host_meta
        check(
            not use_fp8 or is_bytes(hidden),
            f"{verb}: use_fp8 with {hidden.dtype} (expected a one-byte dtype)",
        )
        tokens_per_expert = None
        if handle is None:
            experts = self._num_experts(verb, num_of_experts, num_of_experts_per_rank, topk_idx)
            given = (routing_map, probs, topk_idx, topk_weights)
            routing = routing_of(verb, given, experts, may_wait=not non_blocking)
            exchange = self._exchange(verb, hidden, routing, non_blocking)
            rows = _rows_of(verb, num_permuted_tokens, pad_multiple, non_blocking)
            plan, out = exchange.plan_and_dispatch(
                routing.refused,
                hidden,
                routing.probs,
                scales_of(hidden, scaling_factor),
                routing_map=routing.accepted,
                layout="expert_major",
                pad_multiple=pad_multiple or 1,
                row_budget=rows,
                overflow="drop" if non_blocking else "error",
                num_sms=self._sms(hidden, "num_of_blocks_dispatch_api"),
            )
            # This comes after the launch, which a GPU awaits once it has told the number of rows.
            config = self._config(hidden, plan, pad_multiple, fuse_permute_dispatch)
            handle = PermuteHandle(plan, config, has_budget=non_blocking)
            tokens_per_expert = _counts(handle, on_host=not non_blocking)
        else:
            _check_reuse(verb, handle, num_permuted_tokens, pad_multiple)
            routing = (probs, topk_idx, topk_weights)
            out = self._send_by(handle.plan, hidden, scaling_factor, *routing)
        row_probs = None if out.weights is None else out.weights.view(-1)
        return out.rows, row_probs, out.scales, tokens_per_expert, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PermuteHandle,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. Rows as `dispatch_with_permute` returned them, summed into their tokens.

        hidden [P, H] bf16, fp16 or fp32, unweighted: a rank's rows of a token are summed in fp32
        and rounded, then ranks are, in ascending order. probs fp32 [P]. Padding and slack rows are
        not read. Returns ([T, H], fp32 [T, E] or None): zeros for tokens without rows, and for
        probabilities where the handle's routing has no route.
        Raises InvalidArgument (also an AssertionError).
        """
        verb = "combine_with_unpermute"
        del fuse_unpermute_combine  # the same either way
        if num_dispatched_tokens is not None:
            warn_deprecated(verb, "num_dispatched_tokens")
        _check_reuse(verb, handle, None, pad_multiple)
        return self._bring_back(
            handle.plan, hidden, None if probs is None else probs.reshape(-1, 1)
        )

    # One row for each token on each rank. D: ranks of an NVLink domain.

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: Any = None,
        handle: PlainHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PlainHandle]:
        """Collective. Tokens to the ranks of their experts: a row for each token on each rank.

        hidden [T, H] and scaling_factor, and the routing, as `dispatch_with_permute` takes them.
        num_dispatched_tokens: rows of the result, if the caller knows them already; nothing waits
        for a GPU then, and what does not fit is dropped, last rows first.
        num_dispatched_tokens_tensor has no meaning here.

        Returns (rows, probs, scaling_factor, handle): rows [N, H] by source rank, then token;
        probs fp32 [N, El * D]: the columns of this rank's experts within its domain, zero where a
        row has no route, zero in the other columns; None if not given.
        Raises InvalidArgument (also an AssertionError).
        """
        verb = "dispatch"
        del num_dispatched_tokens_tensor
        if handle is not None:
            check_handle(verb, handle, PlainHandle)
            routing = (probs, topk_idx, topk_weights)
            out = self._send_by(handle.plan, hidden, scaling_factor, *routing)
            return out.rows, self._columns_of(handle, out.weights), out.scales, handle
        experts = self._num_experts(verb, num_of_experts, None, topk_idx)
        given = (routing_map, probs, topk_idx, topk_weights)
        routing = routing_of(verb, given, experts, may_wait=num_dispatched_tokens is None)
        rows = None
        if num_dispatched_tokens is not None:
            rows = count_of(verb, "num_dispatched_tokens", num_dispatched_tokens)
        exchange = self._exchange(verb, hidden, routing, non_blocking=rows is not None)
        plan = exchange.plan(
            routing.refused, routing_map=routing.accepted, layout="rank_major", row_budget=rows
        )
        chosen = numbers(topk_of_map(routing.map, plan.topk))
        scales = [one for one in [scales_of(hidden, scaling_factor)] if one is not None]
        num_sms = self._sms(hidden, "num_of_blocks_dispatch_api")
        _, out, (ids, *scales) = send_beside(
            exchange, plan, hidden, routing.probs, (chosen, *scales), num_sms=num_sms
        )
        ids = received_topk(plan, received_numbers(plan, ids))
        handle = PlainHandle(plan, self._config(hidden, plan, None, False), ids)
        row_probs = self._columns_of(handle, out.weights)
        return out.rows, row_probs, scales[0] if scales else None, handle

    def combine(
        self,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PlainHandle | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. The rows of `dispatch` back to their tokens, summed, unweighted.

        hidden [N, H] bf16, fp16 or fp32; probs fp32 [N, El * D], of which this rank's columns are
        read where a row has a route. Returns ([T, H], fp32 [T, E] or None), zero without routes.
        Raises InvalidArgument (also an AssertionError).
        """
        check_handle("combine", handle, PlainHandle)
        plan = handle.plan
        row_probs = None
        if probs is not None:
            shape = (plan.num_rows, self._num_columns(plan))
            check(
                probs.shape == shape,
                f"combine: probs has shape {list(probs.shape)} (expected {list(shape)})",
            )
            at = self._first_column(plan) + handle.ids.clamp(min=0).to(torch.int64)
            row_probs = torch.where(handle.ids >= 0, probs.gather(1, at), 0.0)
        return self._bring_back(plan, hidden, row_probs)

    def _send_by(
        self, plan: Plan, hidden: Tensor, scaling_factor: Tensor | None, *routing: Tensor | None
    ) -> Dispatched:
        """Along the plan of a handle; routing: probs, or topk_idx and topk_weights in its place."""
        probs, topk_idx, topk_weights = routing
        if topk_idx is not None and topk_weights is not None:
            probs = scatter_columns(topk_idx, topk_weights, plan.num_experts)
        scales = scales_of(hidden, scaling_factor)
        num_sms = self._sms(hidden, "num_of_blocks_dispatch_api")
        return plan.exchange.dispatch(plan, hidden, probs, scales, num_sms=num_sms)

    def _bring_back(
        self, plan: Plan, hidden: Tensor, row_probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        num_sms = self._sms(hidden, "num_of_blocks_combine_api")
        return tuple(plan.exchange.combine(plan, hidden, row_probs, num_sms=num_sms))

    def _first_column(self, plan: Plan) -> int:
        """The first of this rank's experts among those of its domain."""
        return self.local_rank * plan.num_local_experts

    def _num_columns(self, plan: Plan) -> int:
        """Experts of this rank's domain."""
        return plan.num_local_experts * self.num_of_hybrid_ep_ranks_per_nvlink_domain

    def _columns_of(self, handle: PlainHandle, row_weights: Tensor | None) -> Tensor | None:
        """fp32 [N, El * D] from fp32 [N, K], whose columns are a token's choices."""
        if row_weights is None:
            return None
        plan = handle.plan
        at = torch.where(handle.ids >= 0, handle.ids + self._first_column(plan), -1)
        return scatter_columns(at, row_weights, self._num_columns(plan))


def _rows_of(
    verb: str, num_permuted_tokens: Any, pad_multiple: int | None, non_blocking: bool
) -> int | None:
    """Rows to allocate; None: as many as are needed."""
    check(
        num_permuted_tokens is not None or not non_blocking,
        "The num_permuted_tokens is required for non-blocking mode.",
    )
    if num_permuted_tokens is None:
        return None
    rows = count_of(verb, "num_permuted_tokens", num_permuted_tokens)
    check(
        not non_blocking or not pad_multiple or rows % pad_multiple == 0,
        f"{verb}: num_permuted_tokens = {rows} (expected a multiple of pad_multiple = "
        f"{pad_multiple} in non-blocking mode)",
    )
    return rows


def _counts(handle: PermuteHandle, on_host: bool) -> Tensor:
    """int64 [El]: rows of each expert, padding included."""
    plan = handle.plan
    if not on_host:
        return plan.padded_rows_per_expert.clone()
    pinned = plan.exchange.device.type == "cuda"
    counts = plan.padded_rows_per_expert_list
    return torch.tensor(counts, dtype=torch.int64, device="cpu", pin_memory=pinned)


def _check_reuse(
    verb: str, handle: HybridEPHandle, num_permuted_tokens: Any, pad_multiple: int | None
) -> None:
    check_handle(verb, handle, PermuteHandle)
    plan = handle.plan
    check(
        not pad_multiple or pad_multiple == plan.pad_multiple,
        f"{verb}: pad_multiple = {pad_multiple} (the handle has {plan.pad_multiple})",
    )
    is_on_gpu = isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.is_cuda
    if num_permuted_tokens is not None and not is_on_gpu:
        rows = count_of(verb, "num_permuted_tokens", num_permuted_tokens)
        check(
            rows == plan.num_rows,
            f"{verb}: num_permuted_tokens = {rows} (the handle has {plan.num_rows} rows)",
        )
