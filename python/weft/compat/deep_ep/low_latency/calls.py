# SPDX-License-Identifier: Apache-2.0
"""Nothing waits for the GPU in these calls, so they can be captured in a CUDA graph once calls of
the same sizes were made. Results own their memory: any number of them may be alive.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from weft import Unsupported
from weft.fp8 import GROUP, to_fp8, to_ue8m0
from weft.streams import StreamCall

from ..checks import (
    check,
    check_experts,
    check_handle,
    check_least,
    check_routing,
    check_tensor,
    check_topk,
    refused_by_all,
)
from ..events import EventHandle, EventOverlap
from ..layout import routes_of
from ..runtime import Runtime
from .rows import LowLatencyHandle, RankMask, dispatch_blocks, put_back

Hook = Callable[[], None]

_ROW_MULTIPLE = 8  # bf16 elements, 16 bytes


class LowLatencyMode:
    """The part of `Buffer` whose number of rows is fixed. It needs low_latency_mode=True."""

    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    _mask: RankMask
    _runtime: Callable[[str], Runtime]

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple:
        """Collective. A copy of each token for each of its experts, in blocks of R * num_max rows.

        x bf16 [T, H], T up to num_max_dispatch_tokens_per_rank, which is the same on all ranks, and
        H a multiple of 8, or of 128 with use_fp8 (512 with use_ue8m0). topk_idx int64 [T, K], K up
        to 32, no expert twice for a token, values outside [0, num_experts) are no choice.

        Returns (recv_x, recv_count, handle, event, hook). recv_x [El, R * num_max, H] bf16, or
        with use_fp8 (float8_e4m3fn, scales): float32 [El, R * num_max, H / 128], or with use_ue8m0
        int32 [El, R * num_max, H / 512], their last two dimensions column-major. Rows of an expert
        come by source rank, then token; the first recv_count int32 [El] are valid, the others
        undefined. round_scale: scales are powers of two.
        return_recv_hook: nothing may be read before hook() ran; else hook is None.
        cumulative_local_expert_recv_stats int32 [El]: the counts are added to it.
        dispatch_wait_recv_cost_stats int64 [R]: left as it is.
        topk_weights float32 [T, K]: then returns (recv_x, recv_count, recv_topk_weights float32
        [El, R * num_max], recv_rank_info int32 [El, R * num_max], handle, event, hook).
        NVFP4 raises `weft.Unsupported`.
        """
        verb = "low_latency_dispatch"
        runtime = self._low_latency(verb)
        if use_nvfp4 or use_ue8m0_for_sf or x_global_scale is not None:
            raise Unsupported(f"{verb}: NVFP4 is asked for (bf16 or FP8)", "unsupported")
        num_max, local = num_max_dispatch_tokens_per_rank, num_experts // self.group_size
        stats = cumulative_local_expert_recv_stats
        _check_sizes(x, topk_idx, num_max, num_experts, self.group_size)
        exchange = runtime.exchanges.get(
            hidden=x.size(1),
            num_experts=num_experts,
            device=x.device,
            max_tokens=num_max,
            max_topk=topk_idx.size(1),
        )
        options = {"layout": "expert_strided", "expert_stride": self.group_size * num_max}
        with refused_by_all(exchange, **options):
            _check_tokens(x, topk_idx, topk_weights, num_max)
            _check_fp8(x, use_fp8, round_scale, use_ue8m0)
            _check_finish(verb, async_finish, return_recv_hook)
            name = f"{verb}: cumulative_local_expert_recv_stats"
            check_tensor(name, stats, torch.int32, [local])
            self._check_waits(verb, "dispatch", dispatch_wait_recv_cost_stats)
        inputs, is_async = (x, topk_idx, topk_weights, stats), async_finish or return_recv_hook
        with runtime.stream.call(x.device, inputs, async_finish=is_async) as call:
            routes = routes_of(topk_idx, num_experts)
            if self._mask:
                routes = self._mask.without_routes(routes, local)
            rows, scales = to_fp8(x, round_scale) if use_fp8 else (x, None)
            if use_fp8 and use_ue8m0:
                scales = to_ue8m0(scales)
            plan, blocks = dispatch_blocks(exchange, routes, rows, scales, topk_weights, num_max)
            handle = LowLatencyHandle(plan, blocks.sources, num_max)
            if self._mask:
                blocks = blocks.in_order(handle.keep(self._mask.is_kept(handle.source_rank)))
            recv_x = blocks.rows if scales is None else (blocks.rows, blocks.scales(scales.dtype))
            recv_count = handle.count.to(torch.int32)
            if stats is not None:
                stats += recv_count
            between = ()
            if topk_weights is not None:
                between = (blocks.weights, handle.source_rank.to(torch.int32))
            parts = recv_x if isinstance(recv_x, tuple) else ()
            call.returns(*blocks, recv_count, *between, *parts)
        finish = (handle, *_finish(call, async_finish, return_recv_hook))
        return recv_x, recv_count, *between, *finish

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        overlap: bool = False,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Collective. The experts' rows back to their tokens, times their weights, summed.

        x bf16 [El, R * num_max, H]; with zero_copy the rows are those in
        `get_next_low_latency_combine_buffer(handle)` instead. topk_idx [T, K] and topk_weights
        float32 [T, K] are the source's, as for dispatch; slots with a negative index do not count,
        nor do those of ranks that are masked by now (their rows must be numbers all the same).
        Returns (combined_x bf16 [T, H], event, hook); combined_x is `out` if that is given. Sums
        are in fp32: those of a rank's rows, rounded, then of the ranks, rounded.
        use_logfmt only says that a loss is allowed; rows travel as they are.
        combine_wait_recv_cost_stats int64 [R]: left as it is. overlap raises `weft.Unsupported`.
        """
        verb = "low_latency_combine"
        runtime = self._low_latency(verb)
        if overlap or src_signals is not None or src_signal_expect_value != 0:
            raise Unsupported(
                f"{verb}: overlap is asked for (a call begins when x is whole)", "unsupported"
            )
        check_handle(verb, handle, LowLatencyHandle)
        plan = handle.plan
        with refused_by_all(plan.exchange, "combine", plan):
            _check_combine(x, topk_idx, topk_weights, handle, out)
            _check_finish(verb, async_finish, return_recv_hook)
            self._check_waits(verb, "combine", combine_wait_recv_cost_stats)
            check(
                not (zero_copy and use_logfmt),
                f"{verb}: use_logfmt beside zero_copy (one of the two)",
            )
            check(
                not zero_copy or handle.combine_rows is not None,
                f"{verb}: zero_copy without rows (expected in get_next_low_latency_combine_buffer)",
            )
        rows = handle.combine_rows if zero_copy else x
        inputs, is_async = (rows, topk_idx, topk_weights, out), async_finish or return_recv_hook
        with runtime.stream.call(rows.device, inputs, async_finish=is_async) as call:
            if handle.order is not None:
                rows = put_back(rows, handle.order, handle.is_row)
            routes = topk_idx
            if self._mask:  # also of ranks that were masked since the dispatch
                routes = self._mask.without_routes(topk_idx, plan.exchange.num_local_experts)
            combined, _ = plan.exchange.combine(
                plan,
                rows.reshape(-1, handle.hidden),
                scale="source",
                source_weights=topk_weights.masked_fill(routes < 0, 0.0),
            )
            if out is not None:
                combined = out.copy_(combined)
            call.returns(combined)
        return combined, *_finish(call, async_finish, return_recv_hook)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """bf16 [El, R * num_max, H] to write rows to for `low_latency_combine(zero_copy=True)`."""
        verb = "get_next_low_latency_combine_buffer"
        self._low_latency(verb)
        check_handle(verb, handle, LowLatencyHandle)
        if handle.combine_rows is None:
            device = handle.plan.exchange.device
            handle.combine_rows = torch.empty(handle.shape, dtype=torch.bfloat16, device=device)
        return handle.combine_rows

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing: a call leaves nothing behind that the next one must not see."""
        self._low_latency("clean_low_latency_buffer")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local. Masks a rank, or takes it in again. Needs enable_shrink=True."""
        self._check_shrink("low_latency_update_mask_buffer")
        check(
            0 <= rank_to_mask < self.group_size,
            f"low_latency_update_mask_buffer: rank_to_mask = {rank_to_mask} "
            f"(expected 0 to {self.group_size - 1})",
        )
        self._mask.is_masked[rank_to_mask] = mask

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Local. Fills mask_status int32 [R] with 1 for masked ranks, else 0."""
        self._check_shrink("low_latency_query_mask_buffer")
        name = "low_latency_query_mask_buffer: mask_status"
        check_tensor(name, mask_status, torch.int32, [self.group_size])
        mask_status.copy_(self._mask.status())

    def low_latency_clean_mask_buffer(self) -> None:
        """Local. Takes all ranks in again."""
        self._check_shrink("low_latency_clean_mask_buffer")
        self._mask = RankMask(self.group_size)

    def _check_shrink(self, verb: str) -> None:
        self._runtime(verb)
        check(self.enable_shrink, f"{verb}: enable_shrink is False (the buffer needs it)")

    def _low_latency(self, verb: str) -> Runtime:
        runtime = self._runtime(verb)
        check(self.low_latency_mode, f"{verb}: low_latency_mode is False (the buffer needs it)")
        return runtime

    def _check_waits(self, verb: str, name: str, stats: Tensor | None) -> None:
        name = f"{verb}: {name}_wait_recv_cost_stats"
        check_tensor(name, stats, torch.int64, [self.group_size])


def _finish(
    call: StreamCall, async_finish: bool, return_recv_hook: bool
) -> tuple[EventOverlap, Hook | None]:
    event = EventHandle.of(call.event)
    hook = event.current_stream_wait if return_recv_hook else None
    return EventOverlap(event if async_finish else None), hook


def _check_sizes(
    x: Tensor, topk_idx: Tensor, num_max: int, num_experts: int, num_ranks: int
) -> None:
    """These are the same on all ranks."""
    verb = "low_latency_dispatch"
    check(
        x.dtype == torch.bfloat16 and x.dim() == 2,
        f"{verb}: x is {x.dtype} {list(x.shape)} (expected torch.bfloat16 [T, H])",
    )
    check(
        x.size(1) > 0 and x.size(1) % _ROW_MULTIPLE == 0,
        f"{verb}: x has {x.size(1)} columns (expected a positive multiple of {_ROW_MULTIPLE})",
    )
    check_least(f"{verb}: num_max_dispatch_tokens_per_rank", num_max)
    check_topk(verb, topk_idx)
    check_experts(verb, num_experts, num_ranks)


def _check_tokens(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_max: int) -> None:
    """These may differ between ranks."""
    verb = "low_latency_dispatch"
    check(
        x.size(0) <= num_max,
        f"{verb}: x has {x.size(0)} rows (expected at most num_max_dispatch_tokens_per_rank = "
        f"{num_max})",
    )
    check_routing(verb, topk_idx, topk_weights, x.size(0))


def _check_fp8(x: Tensor, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
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


def _check_combine(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, out: Tensor | None
) -> None:
    verb, plan = "low_latency_combine", handle.plan
    check_tensor(f"{verb}: x", x, torch.bfloat16, handle.shape)
    check_topk(verb, topk_idx)
    shape = [plan.num_tokens, plan.topk]
    check_tensor(f"{verb}: topk_idx", topk_idx, topk_idx.dtype, shape)
    check_tensor(f"{verb}: topk_weights", topk_weights, torch.float32, shape)
    check_tensor(f"{verb}: out", out, torch.bfloat16, [plan.num_tokens, handle.hidden])


def _check_finish(verb: str, async_finish: bool, return_recv_hook: bool) -> None:
    check(
        not (async_finish and return_recv_hook),
        f"{verb}: async_finish beside return_recv_hook (one of the two)",
    )
