# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls of a `Buffer`: a block of fixed size for each expert, one row a route.

Nothing waits for the GPU, so the calls can be captured in a CUDA graph once calls of the same
sizes were made. Results own their memory: any number of them may be alive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft import Unsupported
from weft.streams import StreamCall

from . import low_latency_checks as checks
from .checks import check, refused_by_all
from .events import EventHandle, EventOverlap
from .layout import routes_of
from .low_latency_handle import LowLatencyHandle
from .low_latency_rows import dispatch_blocks, put_back
from .quantise import to_fp8, to_ue8m0
from .rank_mask import MaskCalls
from .runtime import Runtime

Tensor = torch.Tensor
Hook = Callable[[], None]


class LowLatencyMode(MaskCalls):
    """The part of `Buffer` whose number of rows is fixed. It needs low_latency_mode=True."""

    low_latency_mode: bool

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
        waits = dispatch_wait_recv_cost_stats
        checks.check_sizes(x, topk_idx, num_max, num_experts, self.group_size)
        exchange = runtime.exchanges.get(
            hidden=x.size(1),
            num_experts=num_experts,
            device=x.device,
            max_tokens=num_max,
            max_topk=topk_idx.size(1),
        )
        options = {"layout": "expert_strided", "expert_stride": self.group_size * num_max}
        with refused_by_all(lambda: exchange.plan(**options)):
            checks.check_tokens(x, topk_idx, topk_weights, num_max)
            checks.check_fp8(x, use_fp8, round_scale, use_ue8m0)
            checks.check_finish(verb, async_finish, return_recv_hook)
            checks.check_stats(
                f"{verb}: cumulative_local_expert_recv_stats", stats, torch.int32, local
            )
            checks.check_stats(
                f"{verb}: dispatch_wait_recv_cost_stats", waits, torch.int64, self.group_size
            )
        with runtime.stream.call(
            x.device,
            (x, topk_idx, topk_weights, stats),
            async_finish=async_finish or return_recv_hook,
        ) as call:
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
            received = (blocks.weights, None)
            if topk_weights is not None:
                received = (blocks.weights, handle.source_rank.to(torch.int32))
            call.returns(*blocks, recv_count, received[1])
            call.returns(*(recv_x if isinstance(recv_x, tuple) else ()))
        between = () if topk_weights is None else received
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
        checks.check_handle(verb, handle)
        plan = handle.plan
        with refused_by_all(lambda: plan.exchange.combine(plan, x.new_empty((0, 1)))):
            checks.check_combine(x, topk_idx, topk_weights, handle, out)
            checks.check_finish(verb, async_finish, return_recv_hook)
            checks.check_stats(
                f"{verb}: combine_wait_recv_cost_stats",
                combine_wait_recv_cost_stats,
                torch.int64,
                self.group_size,
            )
            checks.check_zero_copy(zero_copy, use_logfmt, handle)
        rows = handle.combine_rows if zero_copy else x
        with runtime.stream.call(
            rows.device,
            (rows, topk_idx, topk_weights, out),
            async_finish=async_finish or return_recv_hook,
        ) as call:
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
        checks.check_handle(verb, handle)
        if handle.combine_rows is None:
            device = handle.plan.exchange.device
            handle.combine_rows = torch.empty(handle.shape, dtype=torch.bfloat16, device=device)
        return handle.combine_rows

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing: a call leaves nothing behind that the next one must not see."""
        self._low_latency("clean_low_latency_buffer")

    def _low_latency(self, verb: str) -> Runtime:
        runtime = self._runtime(verb)
        check(self.low_latency_mode, f"{verb}: low_latency_mode is False (the buffer needs it)")
        return runtime


def _finish(
    call: StreamCall, async_finish: bool, return_recv_hook: bool
) -> tuple[EventOverlap, Hook | None]:
    event = EventHandle.of(call.event)
    hook = event.current_stream_wait if return_recv_hook else None
    return EventOverlap(event if async_finish else None), hook
