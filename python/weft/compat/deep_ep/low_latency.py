# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls of a `Buffer`: there is a block of fixed size for each expert.

Nothing waits for the GPU in these calls, so they can be captured in a CUDA graph once calls of
the same sizes were made. Results own their memory: any number of them may be alive. A receive hook
that a caller has forgotten is refused when `deep_ep` would lose the results (hooks.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft import Exchange, Plan, _core
from weft.errors import BadCall, RanksLost
from weft.run.calls import count
from weft.streams import CommStream, StreamCall

from .blocks import as_blocks, dispatch_blocks, put_back
from .checks import check, check_handle, check_tensor
from .handles import LowLatencyHandle
from .hooks import Hook, LastHooks, Receive
from .masks import RankMask
from .orders import in_any_order
from .row_signals import by_block, by_expert
from .runtime import Call, ExchangePool, NoGradients, Runtime
from .steps import Steps
from .utils.event import EventHandle, EventOverlap

# Options of a dispatch, as for `Exchange.refuse`, until the stride is known.
_WANTS = {"layout": "expert_strided", "expert_stride": 1}


class LowLatencyMode:
    """The part of `Buffer` whose number of rows is fixed. It needs low_latency_mode=True.

    With enable_shrink a call during which a rank is lost returns on all other ranks, with their
    results, and a query of the mask afterwards finds the lost rank. On GPUs the query waits for the
    current stream. There, a call with a hook, a replayed graph, and a call between domains are not
    repeated: they return with counts and sums of 0, or what is left of a call that was cut short,
    and so do some calls after them. Then, from the same call on all ranks, calls are among the
    ranks that are left (steps.py), also in graphs that were captured before.
    """

    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    _mask: RankMask
    _HANDLE = LowLatencyHandle  # the kind that dispatch returns
    _hooks: LastHooks
    _pool: ExchangePool | None
    _comm_stream: Callable[[], CommStream]
    _runtime: Callable[[], Runtime]

    @in_any_order
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        x_global_scale: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_nvfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        use_ue8m0_for_sf: bool = False,
        use_mxfp8: bool = False,
    ) -> tuple:
        """Collective. Copies each token to each of its experts, in blocks of R * num_max rows.
        Arguments after num_experts may also come in the positions of V1 or of hybrid-ep.

        x bf16 [T, H], T up to num_max_dispatch_tokens_per_rank, which is the same on all ranks, and
        H a multiple of 8, or of 128 with use_fp8 (512 with use_ue8m0), or of 64 with use_nvfp4 and
        128 with use_mxfp8, which go before use_fp8. topk_idx int64 [T, K], K up
        to 32, no expert twice for a token, values outside [0, num_experts) are no choice.

        Returns (recv_x, recv_count, handle, event, hook). recv_x [El, R * num_max, H] bf16, or
        with use_fp8 (float8_e4m3fn, scales): float32 [El, R * num_max, H / 128], or with use_ue8m0
        int32 [El, R * num_max, H / 512], their last two dimensions column-major; with use_mxfp8
        such packed scales for 32 elements, int32 [El, R * num_max, H / 128]; with use_nvfp4
        (uint8 [R * num_max, H / 2, El], scales [32, 4, M, 4, H / 64, El] with M = R * num_max / 128
        rounded up), both with El outermost in memory (`block_formats.as_tiles`). Rows of an expert
        come by source rank, then token; the first recv_count int32 [El] are valid, the others
        undefined. round_scale: scales are powers of two.
        return_recv_hook: nothing may be read before hook() ran, which must be before the next call
        but one; else hook is None.
        cumulative_local_expert_recv_stats int32 [El]: the counts are added to it.
        dispatch_wait_recv_cost_stats int64 [R]: the microseconds that this rank has waited for each
        rank in the call are added to it (`Exchange.waits_added`).
        topk_weights float32 [T, K]: then returns (recv_x, recv_count, recv_topk_weights float32
        [El, R * num_max], recv_rank_info int32 [El, R * num_max], handle, event, hook).
        x_global_scale (float32, its first number; None is 1) and use_ue8m0_for_sf are NVFP4's and
        ignored without it: scales are float8_e4m3fn, or int8 exponents + 127, of x_global_scale * a
        sixth of the largest magnitude of 16.
        """
        num_max, stats = num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats
        waits = dispatch_wait_recv_cost_stats
        formats = (use_fp8, round_scale, use_ue8m0, use_nvfp4, use_mxfp8, use_ue8m0_for_sf)
        global_scale = _first_of(x_global_scale) if use_nvfp4 else None
        tensors = (x, topk_idx, topk_weights, stats, waits, global_scale)
        how = (formats, async_finish, return_recv_hook)
        made = self._dispatch_at_once(tensors, num_max, num_experts, *how)
        if made is not None:
            return made
        wants = _WANTS.copy()
        with NoGradients(), Call("low_latency_dispatch", self._pool, **wants) as call:
            call.is_for(x, num_experts, num_max, with_masks=True)
            stream = self._low_latency(async_finish, return_recv_hook)
            self._hooks.check()
            block_ranks = self._block_ranks(num_experts)
            sizes = (num_max, num_experts, block_ranks)
            hidden, topk, options = _core.check_block_dispatch(tensors, *sizes, formats)
            call.meet(device=x.device)
            local, waits = num_experts // block_ranks, self._mask.waits(waits)
            wants["expert_stride"] = block_ranks * num_max
            device = x.device
            key = (hidden, local * self._pool.group.num_ranks, device)
            exchange = call.plans(key, num_max, topk, with_masks=True, **wants)
            lost, steps = self._pool.lost, Steps.of(exchange)
            is_async = async_finish or return_recv_hook
            # Rows that need a launch after the receive are received at once, not by the hook.
            is_later = return_recv_hook and topk_weights is None and not self._mask.has_any
            is_later = is_later and (stats is None or stats.is_contiguous())
            with stream.call(device, tensors, async_finish=is_async) as work:
                self._hooks.receive()
                routes = self._mask.routes(topk_idx, num_experts, local)
                # A CPU's call may lose ranks after it has counted, and a GPU's is made again.
                is_open = self.enable_shrink and not x.is_cuda
                is_made_again = self.enable_shrink and x.is_cuda and not is_later
                counted = None if self._mask.has_any or is_open or is_made_again else stats
                given = (routes, x, topk_weights, counted, global_scale, is_later)
                with _NOTHING if waits is None else exchange.waits_added(waits):
                    plan, blocks = steps.dispatch(
                        functools.partial(dispatch_blocks, exchange, options, *given)
                    )
                handle = self._HANDLE(plan, blocks.sources, num_max, topk_idx)
                handle.ranks, handle.num_experts = self._mask.ranks, num_experts
                is_open = is_open and self._pool.lost != lost  # since the plan, perhaps
                if self._mask.has_any or is_open:
                    blocks = blocks.in_order(handle.keep(~self._mask.of(handle.source_rank)))
                    blocks.counts.copy_(handle.count)
                if stats is not None and counted is None:
                    stats += blocks.counts
                parts = blocks.parts()
                between = ()
                if topk_weights is not None:
                    rank_info = self._mask.numbers(handle.source_rank).to(torch.int32)
                    between = (blocks.weights, rank_info)
                if is_async:
                    work.returns(*blocks, *between)
        receive = _receive_of(plan, waits, stream) if is_later else None
        finish = self._finish("low_latency_dispatch", work, return_recv_hook, receive)
        handle.hook = finish[1]
        return parts or blocks.rows, blocks.counts, *between, handle, *finish

    def _dispatch_at_once(
        self,
        tensors: tuple[Tensor | None, ...],
        num_max: int,
        num_experts: int,
        formats: tuple[object, ...],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple | None:
        """Does a common `low_latency_dispatch` by one call of the core. Returns None, with nothing
        begun, for an uncommon call or wrong arguments."""
        told = _core.num_told()
        try:
            if not tensors[2] is tensors[4] is None:
                return None
            if self.enable_shrink and tensors[3] is not None:
                return None
            runtime = self._runtime()
            pool, stream, work = runtime.exchanges, runtime.stream, None
            exchange = pool.planned.get(True)
            if exchange is None or not self._is_plain(exchange, async_finish, return_recv_hook):
                return None
            given = (tensors, (num_max, num_experts, self._block_ranks(num_experts)), formats)
            is_async = async_finish or return_recv_hook
            current = None if is_async else stream.current(exchange.gpu)
            if current is not None:
                found = exchange.dispatch_blocks_at_once(*given, stream=current)
            else:
                with stream.call(exchange.device, tensors, async_finish=is_async) as work:
                    found = exchange.dispatch_blocks_at_once(*given, return_recv_hook)
                    work.returns(*(found[1] if is_async and found else ()))
        except RanksLost:
            return None
        except BaseException as error:
            if isinstance(error, Exception) and _core.num_told() == told:
                return None
            with Call("low_latency_dispatch", self._pool, since=told, **_WANTS):
                raise
        if found is None:
            return None
        pool.last = exchange
        count("low_latency_dispatch")
        plan, (rows, _, scales, _, sources, counts) = found
        if self.enable_shrink:
            plan.era = Steps.of(exchange).era
        is_nvfp4 = formats[3]
        handle = self._HANDLE(plan, sources, num_max, tensors[1])
        moved = rows if scales is None else (rows, scales)
        moved = as_blocks(found[1]).parts() if is_nvfp4 else moved
        if work is None:
            self._hooks.add(None)
            return moved, counts, handle, EventOverlap(), None
        receive = _receive_of(plan, None, stream) if return_recv_hook else None
        finish = self._finish("low_latency_dispatch", work, return_recv_hook, receive)
        handle.hook = finish[1]
        return moved, counts, handle, *finish

    def _is_plain(
        self,
        exchange: Exchange,
        async_finish: bool,
        return_recv_hook: bool,
        plan: Plan | None = None,
    ) -> bool:
        """Returns whether the core alone makes this call. plan: of a combine."""
        mask = self._mask
        is_of_all = not (mask.has_any or mask.renumbers)
        if self.enable_shrink and is_of_all:
            is_of_all = self._pool.is_in_step(exchange, plan)
        is_good = self.low_latency_mode and not (async_finish and return_recv_hook)
        return is_of_all and is_good and self._hooks.are_over

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
        overlap: bool = False,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
        *,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Collective. Sums the experts' rows, times their weights, into their tokens.

        x bf16 [El, R * num_max, H]; with zero_copy the rows are those in
        `get_next_low_latency_combine_buffer(handle)` instead. topk_idx [T, K] and topk_weights
        float32 [T, K] are the source's, as for dispatch, in any order of a token's slots (another
        tensor than dispatch's takes some launches more, and that one must not have changed); slots
        that name no expert do not count, nor do those of ranks that are masked by now (their rows
        must be numbers all the same). A slot with another expert than the dispatch had is refused
        on all ranks; on GPUs the rank's next call is refused, and the token's sum is NaN if the
        dispatch had an expert there.
        Returns (combined_x bf16 [T, H], event, hook); combined_x is `out` if that is given. Sums
        are in fp32: those of a rank's rows, rounded, then of the ranks, rounded.
        use_logfmt, not with zero_copy and for an H that is a multiple of 128: sums travel in ten
        bits an element (docs/wire.md). They are received at once then, not by the hook.
        return_recv_hook: as for dispatch; of all ranks or none.
        combine_wait_recv_cost_stats int64 [R]: as for dispatch.

        Single-batch overlap, of all ranks or none: the call begins while x is being written, and a
        row is sent once its block is whole. Either src_signals int32 or uint32 [El or more]: the
        rows of an expert are one block, whole when its signal equals src_signal_expect_value. Or,
        with overlap and return_recv_hook, comp_signal int32, flat: for each expert ceil(R * num_max
        / block_m) blocks of block_m rows, whole when equal to threshold; packed_recv_count is
        dispatch's recv_count, and num_sms the most multiprocessors of the send. With src_signals
        these are 32, or those that are not expected to signal. Beside masked ranks it raises
        `weft.Unsupported`.
        """
        given = (x, topk_idx, topk_weights, out, combine_wait_recv_cost_stats)
        beside = (use_logfmt, zero_copy, overlap)
        if src_signals is None:
            made = self._combine_at_once(given, handle, beside, async_finish, return_recv_hook)
            if made is not None:
                return made
        with NoGradients(), Call("low_latency_combine", self._pool, "combine") as call:
            call.is_for(None, None, with_masks=True)
            stream = self._low_latency(async_finish, return_recv_hook)
            check_handle(handle, LowLatencyHandle)
            plan = call.by(handle.plan)
            self._hooks.check(handle.hook)
            ready, most_sms, num_sms = None, num_sms, 0
            if src_signals is not None:
                check(comp_signal is None, "comp_signal beside src_signals (one of the two)")
                ready, num_sms = by_expert(src_signals, src_signal_expect_value, handle)
            elif overlap:
                blocks = (packed_recv_count, comp_signal, block_m, threshold)
                ready, num_sms = by_block(*blocks, most_sms, return_recv_hook, handle)
            waits = self._mask.waits(combine_wait_recv_cost_stats)
            given = (x, topk_idx, topk_weights, out, waits)
            if plan.core is not None:
                _core.check_block_combine(given, plan.core, handle.stride, handle.hidden)
            rows = handle.rows_to_combine(use_logfmt) if zero_copy else x
            if use_logfmt:
                check_wire(handle.hidden)
            inputs = (rows, topk_idx, topk_weights, out, waits, src_signals, comp_signal)
            is_async = async_finish or return_recv_hook
            with stream.call(rows.device, inputs, async_finish=is_async) as work:
                self._hooks.receive()
                if handle.order is not None:
                    rows = put_back(rows, handle.order, handle.is_row)
                # Also leaves out ranks masked since the dispatch.
                sizes = (plan.exchange.num_experts, plan.exchange.num_local_experts)
                routes, weights = self._mask.routes(topk_idx, *sizes), topk_weights
                if not handle.has_order_of(topk_idx):
                    own = self._mask.routes(handle.topk_idx, *sizes)
                    routes, weights = _in_order_of(own, routes, weights, sizes[0])
                    if plan.exchange.is_between_gpu_domains:  # calls wait for their GPU there
                        is_strange = ((routes != own) & (routes >= 0)).any()
                        check(not is_strange, "topk_idx names experts that its dispatch did not")
                if plan.exchange.is_between_gpu_domains:
                    routes, weights = None, weights.masked_fill(routes < 0, 0.0)
                is_whole = out is not None and out.is_contiguous()
                into = out if is_whole else None
                if self.enable_shrink and rows.is_cuda:  # what loses a rank leaves it as it was
                    into = _cleared(into, topk_idx, handle.hidden)
                bring = functools.partial(
                    call.exchange.combine,
                    plan,
                    rows,
                    blocks=True,
                    scale="source",
                    source_weights=weights,
                    source_idx=routes,
                    out=into,
                    num_sms=num_sms,
                    receives_later=return_recv_hook,
                    ready=ready,
                    wire="logfmt10" if use_logfmt else "none",
                )
                with _NOTHING if waits is None else call.exchange.waits_added(waits, plan):
                    combined = Steps.of(plan.exchange).combine(
                        plan,
                        lambda: bring().x,
                        lambda: _cleared(into, topk_idx, handle.hidden),
                    )
                receive = _receive_of(plan, waits, stream) if return_recv_hook else None
                if out is not None and not is_whole:
                    copy, combined = functools.partial(out.copy_, combined), out
                    copy() if receive is None else receive.then(copy)
                work.returns(combined)
        finish = self._finish("low_latency_combine", work, return_recv_hook, receive)
        return combined, *finish

    def _combine_at_once(
        self,
        tensors: tuple[Tensor | None, ...],
        handle: LowLatencyHandle,
        beside: tuple[object, ...],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, EventOverlap, Hook | None] | None:
        """Does a common `low_latency_combine` by one call of the core. None: see
        `_dispatch_at_once`. beside: options that make it uncommon."""
        told = _core.num_told()
        try:
            if any(beside) or not tensors[4] is handle.order is None:
                return None
            runtime, plan = self._runtime(), handle.plan
            exchange, stream, work = plan.exchange, runtime.stream, None
            is_own = isinstance(handle, LowLatencyHandle) and handle.has_order_of(tensors[1])
            if not (is_own and self._is_plain(exchange, async_finish, return_recv_hook, plan)):
                return None
            if self.enable_shrink:
                x, idx, weights, out, waits = tensors
                tensors = (x, idx, weights, _cleared(out, idx, x.size(-1)), waits)
            if handle.hook is not None and not handle.hook.was_called:
                return None
            given = (plan, tensors, handle.stride)
            is_async = async_finish or return_recv_hook
            current = None if is_async else stream.current(exchange.gpu)
            if current is not None:
                combined = exchange.combine_blocks_at_once(*given, stream=current)
            else:
                with stream.call(exchange.device, tensors, async_finish=is_async) as work:
                    combined = exchange.combine_blocks_at_once(*given, return_recv_hook)
                    work.returns(combined)
        except RanksLost:
            return None
        except BaseException as error:
            if isinstance(error, Exception) and _core.num_told() == told:
                return None
            with Call("low_latency_combine", self._pool, "combine", told) as call:
                call.by(handle.plan)
                raise
        if combined is None:
            return None
        runtime.exchanges.last = exchange
        count("low_latency_combine")
        if work is None:
            self._hooks.add(None)
            return combined, EventOverlap(), None
        receive = _receive_of(plan, None, stream) if return_recv_hook else None
        return combined, *self._finish("low_latency_combine", work, return_recv_hook, receive)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Returns memory for rows of zero_copy combines, bf16 [El, R * num_max, H]."""
        with Call("get_next_low_latency_combine_buffer"):
            self._low_latency()
            check_handle(handle, LowLatencyHandle)
        if handle.combine_rows is None:
            device = handle.plan.exchange.device
            handle.combine_rows = torch.empty(handle.shape, dtype=torch.bfloat16, device=device)
        return handle.combine_rows

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Forgets hooks that were not called; calls leave nothing else behind. With enable_shrink
        it is collective once low-latency calls were made, and masks ranks that do not come."""
        with Call("clean_low_latency_buffer"):
            self._low_latency()
        self._hooks = LastHooks()
        exchange = self._pool.planned.get(True)
        if self.enable_shrink and exchange is not None:
            device, stride = exchange.device, {"layout": "expert_strided", "expert_stride": 1}
            nothing = torch.empty(0, exchange.hidden, dtype=torch.bfloat16, device=device)
            nowhere = torch.empty(0, 1, dtype=torch.int64, device=device)
            Steps.of(exchange).dispatch(
                lambda is_skipped: exchange.plan_and_dispatch(
                    nowhere, nothing, is_skipped=is_skipped, **stride
                )
            )

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local, of all ranks. Masks a rank, or takes it in again. Needs enable_shrink=True.

        After the first call that goes on without lost ranks, a masked rank is lost: the next call
        does not wait for it, its own calls raise `weft.PeerError`, and taking it in again raises
        `weft.Unsupported`. Otherwise it still makes calls, and its tokens, counts and sums are left
        out.
        """
        with Call("low_latency_update_mask_buffer"):
            self._check_shrink()
            most = self.group_size - 1
            is_rank = 0 <= rank_to_mask <= most
            check(is_rank, f"rank_to_mask = {rank_to_mask} (expected 0 to {most})")
            is_other = rank_to_mask != self.rank
            self._look()
            if not (mask and is_other and self._mask.is_in_calls(rank_to_mask)):
                self._mask.set(rank_to_mask, mask)
                return
            place = self._mask.place_of(rank_to_mask)
            if self._pool.mask([place]):
                self._mask.lose([place])
            else:
                self._mask.set(rank_to_mask, True)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Local. Fills mask_status int32 [R] with 1 for masked ranks, lost ones included, else 0.
        In a capture: as they are then."""
        with Call("low_latency_query_mask_buffer"):
            self._check_shrink()
            check_tensor("mask_status", mask_status, torch.int32, [self.group_size])
            self._look()
        mask_status.copy_(self._mask.is_masked[:-1])

    def low_latency_clean_mask_buffer(self) -> None:
        """Local. Takes all ranks in again. Raises `weft.Unsupported` if some are lost."""
        with Call("low_latency_clean_mask_buffer"):
            self._check_shrink()
            self._look()
            self._mask.clear()

    def _block_ranks(self, num_experts: int) -> int:
        """Returns R of blocks for num_experts."""
        del num_experts
        return self.group_size

    def _look(self) -> None:
        """Looks for losses in the whole pool."""
        self._look_at(self._pool)

    def _look_at(self, pool: ExchangePool) -> None:
        """Hears of ranks that GPUs have lost; local, on all ranks that are left, at any of their
        calls. A sent call is received, so that it counts as made."""
        for exchange in pool.going_on_gpus():
            if not self._hooks.are_over:
                with self._comm_stream().call(exchange.device):
                    self._hooks.receive()
            Steps.of(exchange).look(exchange)

    def _check_shrink(self) -> None:
        self._comm_stream()  # the buffer is alive
        check(self.enable_shrink, "enable_shrink is False (the buffer needs it)")

    def _low_latency(
        self, async_finish: bool = False, return_recv_hook: bool = False
    ) -> CommStream:
        stream = self._comm_stream()
        if not self.low_latency_mode:
            raise BadCall("low_latency_mode is False (the buffer needs it)")
        if async_finish and return_recv_hook:
            raise BadCall("async_finish beside return_recv_hook (one of the two)")
        return stream

    def _finish(
        self, name: str, call: StreamCall, return_recv_hook: bool, receive: Receive | None = None
    ) -> tuple[EventOverlap, Hook | None]:
        """Returns the event and the hook of a call, or with `receive` of its sent half."""
        hook = event = None
        if receive is not None:
            hook = Hook(name, receive.wait, receive.ahead)
        elif call.async_finish:
            event = EventHandle.of(call.event)
            if return_recv_hook:
                hook, event = Hook(name, event.current_stream_wait), None
        self._hooks.add(hook)
        return EventOverlap(event), hook


_NOTHING = contextlib.nullcontext()


def _cleared(out: Tensor | None, topk_idx: Tensor, hidden: int) -> Tensor:
    """Returns zeros for the sums of a combine, in `out` if given."""
    if out is not None:
        return out.zero_()
    shape = (topk_idx.size(0), hidden)
    return torch.zeros(shape, dtype=torch.bfloat16, device=topk_idx.device)


def _receive_of(plan: Plan, waits: Tensor | None, stream: CommStream) -> Receive | None:
    """Returns the `Receive` that the plan's call has left to its hook, or None."""
    return Receive(plan, waits, stream) if plan.exchange.is_open(plan) else None


def _in_order_of(
    own: Tensor, given: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Moves choices of `given` [T, K], and weights, to the places that `own` [T, K] has for the
    same experts; -1 and 0 elsewhere. A choice unknown to `own` replaces another, so that the call
    refuses it."""
    is_choice = (given >= 0) & (given < num_experts)
    is_it = (own.unsqueeze(2) == given.unsqueeze(1)) & is_choice.unsqueeze(1)
    is_it &= is_it.cumsum(1) == 1  # of an expert that `own` has twice the first place
    placed = torch.where(is_it, weights.unsqueeze(1), 0.0).sum(2)
    strange = given.masked_fill(~is_choice | is_it.any(1), -1).amax(1, keepdim=True)
    routes = own.masked_fill(~is_it.any(2), -1)
    return torch.where((strange >= 0) & (own != strange), strange, routes), placed


def _first_of(scale: Any) -> Any:
    """Returns the first number: callers may repeat it per expert."""
    if not isinstance(scale, Tensor) or scale.shape == (1,):
        return scale
    return scale.reshape(-1)[:1]


def check_wire(hidden: int) -> None:
    """Raises BadCall unless sums of so many elements can travel as logfmt."""
    group = _core.QUANTISE_GROUP
    check(hidden % group == 0, f"use_logfmt for {hidden} columns of x (a multiple of {group})")
