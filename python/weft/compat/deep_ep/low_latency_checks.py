# SPDX-License-Identifier: Apache-2.0
"""What the low-latency calls of a `Buffer` accept."""

from __future__ import annotations

from typing import Any

import torch

from .checks import check
from .layout import check_experts, check_topk
from .low_latency_handle import LowLatencyHandle
from .quantise import GROUP

Tensor = torch.Tensor

_ROW_MULTIPLE = 8  # bf16 elements, 16 bytes


def check_sizes(
    x: Tensor, topk_idx: Tensor, num_max: int, num_experts: int, num_ranks: int
) -> None:
    """What is the same on all ranks."""
    verb = "low_latency_dispatch"
    check(
        x.dtype == torch.bfloat16 and x.dim() == 2,
        f"{verb}: x is {x.dtype} {list(x.shape)} (expected torch.bfloat16 [T, H])",
    )
    check(
        x.size(1) > 0 and x.size(1) % _ROW_MULTIPLE == 0,
        f"{verb}: x has {x.size(1)} columns (expected a positive multiple of {_ROW_MULTIPLE})",
    )
    check(
        num_max >= 1,
        f"{verb}: num_max_dispatch_tokens_per_rank = {num_max} (expected at least 1)",
    )
    check_topk(verb, topk_idx)
    check_experts(verb, num_experts, num_ranks)


def check_tokens(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_max: int) -> None:
    """What may differ between ranks."""
    verb = "low_latency_dispatch"
    check(
        x.size(0) <= num_max,
        f"{verb}: x has {x.size(0)} rows (expected at most num_max_dispatch_tokens_per_rank = "
        f"{num_max})",
    )
    check(
        topk_idx.size(0) == x.size(0),
        f"{verb}: topk_idx has {topk_idx.size(0)} rows (expected {x.size(0)}, those of x)",
    )
    if topk_weights is not None:
        _check_weights(verb, topk_weights, topk_idx)


def check_fp8(x: Tensor, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
    verb = "low_latency_dispatch"
    check(
        round_scale or not use_ue8m0,
        f"{verb}: use_ue8m0 without round_scale (it packs powers of two)",
    )
    multiple = 4 * GROUP if use_ue8m0 else GROUP
    check(
        not use_fp8 or x.size(1) % multiple == 0,
        f"{verb}: x has {x.size(1)} columns (expected a multiple of {multiple} for its scales)",
    )


def check_combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: LowLatencyHandle,
    out: Tensor | None,
) -> None:
    verb = "low_latency_combine"
    num_tokens = handle.plan.num_tokens
    check(
        x.dtype == torch.bfloat16 and list(x.shape) == handle.shape,
        f"{verb}: x is {x.dtype} {list(x.shape)} (expected torch.bfloat16 {handle.shape})",
    )
    check_topk(verb, topk_idx)
    check(
        list(topk_idx.shape) == [num_tokens, handle.plan.topk],
        f"{verb}: topk_idx has shape {list(topk_idx.shape)} "
        f"(expected {[num_tokens, handle.plan.topk]}, as for dispatch)",
    )
    _check_weights(verb, topk_weights, topk_idx)
    if out is not None:
        expected = [num_tokens, handle.hidden]
        check(
            out.dtype == torch.bfloat16 and list(out.shape) == expected,
            f"{verb}: out is {out.dtype} {list(out.shape)} (expected torch.bfloat16 {expected})",
        )


def check_handle(verb: str, handle: Any) -> None:
    check(
        isinstance(handle, LowLatencyHandle),
        f"{verb}: handle is a {type(handle).__name__} (expected low_latency_dispatch's)",
    )


def check_stats(name: str, stats: Tensor | None, dtype: torch.dtype, length: int) -> None:
    if stats is not None:
        check(
            stats.dtype == dtype and list(stats.shape) == [length],
            f"{name} is {stats.dtype} {list(stats.shape)} (expected {dtype} [{length}])",
        )


def check_zero_copy(zero_copy: bool, use_logfmt: bool, handle: LowLatencyHandle) -> None:
    verb = "low_latency_combine"
    check(not (zero_copy and use_logfmt), f"{verb}: use_logfmt beside zero_copy (one of the two)")
    check(
        not zero_copy or handle.combine_rows is not None,
        f"{verb}: zero_copy without rows (expected in get_next_low_latency_combine_buffer)",
    )


def check_finish(verb: str, async_finish: bool, return_recv_hook: bool) -> None:
    check(
        not (async_finish and return_recv_hook),
        f"{verb}: async_finish beside return_recv_hook (one of the two)",
    )


def _check_weights(verb: str, topk_weights: Tensor, topk_idx: Tensor) -> None:
    check(
        topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape,
        f"{verb}: topk_weights is {topk_weights.dtype} {list(topk_weights.shape)} "
        f"(expected torch.float32 {list(topk_idx.shape)})",
    )
