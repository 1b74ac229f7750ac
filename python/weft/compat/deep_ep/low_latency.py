# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls of a `Buffer`: there is a block of fixed size for each expert.

Nothing waits for the GPU in these calls, so they can be captured in a CUDA graph once calls of
the same sizes were made. Results own their memory: any number of them may be alive. A receive hook
that a caller has forgotten is refused when `deep_ep` would lose the results (hooks.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft import Exchange, _core
from weft.errors import BadCall, Unsupported
from weft.run.calls import count
from weft.streams import CommStream, StreamCall

from .blocks import dispatch_blocks, put_back
from .checks import check, check_handle, check_tensor
from .handles import LowLatencyHandle
from .hooks import Hook, LastHooks, Receive
from .layout import routes_of
from .row_signals import by_block, by_expert
from .runtime import Call, ExchangePool, NoGradients, Runtime
from .utils.event import EventHandle, EventOverlap

# What all ranks call, as for `Exchange.refuse`, until the stride is known.
_WANTS = {"layout": "expert_strided", "expert_stride": 1}
_V1_ORDER = (  # of what may follow num_experts by position
    "cumulative_local_expert_recv_stats",
    "dispatch_wait_recv_cost_stats",
    "use_fp8",
    "round_scale",
    "use_ue8m0",
    "async_finish",
    "return_recv_hook",
)
_HYBRID_ORDER = (
    "topk_weights",
    "cumulative_local_expert_recv_stats",
    "dispatch_wait_recv_cost_stats",
    "x_global_scale",
    "use_fp8",
    "round_scale",
    "use_ue8m0",
    "use_nvfp4",
    "use_ue8m0_for_sf",
    "async_finish",
    "return_recv_hook",
)


def _in_any_order(dispatch: Callable[..., tuple]) -> Callable[..., tuple]:
    """What follows num_experts by position may be in the order of `dispatch`, which is that of
    sgl-deep-ep, in V1's or in that of the hybrid-ep branch."""
    parameters = inspect.signature(dispatch).parameters.values()
    places = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    sgl_order = tuple(places[places.index("num_experts") + 1 :])

    @functools.wraps(dispatch)
    def call(
        self: LowLatencyMode,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *more: Any,
        **options: Any,
    ) -> tuple:
        if not more:
            num_max = num_max_dispatch_tokens_per_rank
            return dispatch(self, x, topk_idx, num_max, num_experts, **options)
        given = (self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts)
        order = _order_of(more, sgl_order)
        beyond = more[len(order) :]  # Python refuses these
        return dispatch(*given, *beyond, **dict(zip(order, more)), **options)

    return call


def _order_of(given: tuple[Any, ...], sgl_order: tuple[str, ...]) -> tuple[str, ...]:
    """use_fp8 is third in V1's order, fourth in sgl-deep-ep's and fifth in hybrid-ep's. Before it
    stand tensors or None: of hybrid-ep first the weights, with two dimensions, then what is first
    and second elsewhere, of int32 and int64."""
    first, second, third, fourth = (*given, *(False,) * 4)[:4]
    if (
        getattr(first, "ndim", 1) == 2
        or getattr(second, "dtype", None) == torch.int32
        or getattr(third, "dtype", None) == torch.int64
        or not isinstance(fourth, bool | int)
    ):
        return _HYBRID_ORDER
    return _V1_ORDER if isinstance(third, bool | int) else sgl_order


class LowLatencyMode:
    """The part of `Buffer` whose number of rows is fixed. It needs low_latency_mode=True."""

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

    @_in_any_order
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
        """Collective. A copy of each token for each of its experts, in blocks of R * num_max rows.
        What follows num_experts by position may also be in the order of V1 or of hybrid-ep.

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
        tensors = (x, topk_idx, topk_weights, stats, waits, None)
        beside = (async_finish, return_recv_hook, use_nvfp4)
        made = self._dispatch_at_once(tensors, num_max, num_experts, formats, beside)
        if made is not None:
            return made
        wants = _WANTS.copy()
        with NoGradients(), Call("low_latency_dispatch", self._pool, **wants) as call:
            stream = self._low_latency(async_finish, return_recv_hook)
            self._hooks.check()
            global_scale = _first_of(x_global_scale) if use_nvfp4 else None
            inputs = (x, topk_idx, topk_weights, stats, waits, global_scale)
            block_ranks = self._block_ranks(num_experts)
            sizes = (num_max, num_experts, block_ranks)
            hidden, topk, options = _core.check_block_dispatch(inputs, *sizes, formats)
            local, waits = num_experts // block_ranks, self._mask.waits(waits)
            wants["expert_stride"] = block_ranks * num_max
            device = x.device
            key = (hidden, local * self._pool.group.num_ranks, device)
            exchange = call.plans(key, num_max, topk, **wants)
            lost = self._pool.lost
            is_async = async_finish or return_recv_hook
            # Where more is to be done with what has come than one launch does, it does it at once.
            is_later = return_recv_hook and topk_weights is None and not self._mask.has_any
            is_later = is_later and (stats is None or stats.is_contiguous())
            with stream.call(device, inputs, async_finish=is_async) as work:
                self._hooks.receive()
                routes = self._mask.routes(topk_idx, num_experts, local)
                counted = None if self._mask.has_any or self.enable_shrink else stats
                with _NOTHING if waits is None else exchange.waits_added(waits):
                    given = (routes, x, topk_weights, counted, global_scale)
                    plan, blocks = dispatch_blocks(exchange, options, *given, is_later)
                handle = self._HANDLE(plan, blocks.sources, num_max, topk_idx)
                if self._mask.has_any or self._pool.lost != lost:  # since the plan, perhaps
                    blocks = blocks.in_order(handle.keep(~self._mask.of(handle.source_rank)))
                    blocks.counts.copy_(handle.count)
                if stats is not None and counted is None:
                    stats += blocks.counts
                parts = blocks.parts()
                between = ()
                if topk_weights is not None:
                    between = (blocks.weights, handle.source_rank.to(torch.int32))
                if is_async:
                    work.returns(*blocks, *between)
        is_open = is_later and plan.exchange.is_open(plan)
        receive = Receive(plan, waits, stream) if is_open else None
        finish = self._finish("low_latency_dispatch", work, return_recv_hook, receive)
        handle.hook = finish[1]
        return parts or blocks.rows, blocks.counts, *between, handle, *finish

    def _dispatch_at_once(
        self,
        tensors: tuple[Tensor | None, ...],
        num_max: int,
        num_experts: int,
        formats: tuple[object, ...],
        beside: tuple[object, ...],
    ) -> tuple | None:
        """`low_latency_dispatch` as it mostly is: one call of the core. None, and nothing has
        begun, where there is more to it (`beside`, weights, or statistics of waits), or something
        is wrong with what it was given."""
        told = _core.num_told()
        try:
            if any(beside) or not tensors[2] is tensors[4] is None:
                return None
            runtime = self._runtime()
            pool = runtime.exchanges
            exchange = pool.planned
            if exchange is None or not self._is_plain(runtime.stream, exchange):
                return None
            sizes = (num_max, num_experts, self._block_ranks(num_experts))
            found = exchange.dispatch_blocks_at_once(tensors, sizes, formats)
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
        handle = self._HANDLE(plan, sources, num_max, tensors[1])
        return rows if scales is None else (rows, scales), counts, handle, EventOverlap(), None

    def _is_plain(self, stream: CommStream, exchange: Exchange) -> bool:
        """Whether a call on the exchange has nothing to do but what the core does."""
        mask = self._mask
        is_of_all = not (mask.has_any or mask.renumbers or self.enable_shrink)
        is_usual = is_of_all and self.low_latency_mode and self._hooks.are_none
        return is_usual and stream.is_current(exchange.device)

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
        """Collective. The experts' rows back to their tokens, times their weights, summed.

        x bf16 [El, R * num_max, H]; with zero_copy the rows are those in
        `get_next_low_latency_combine_buffer(handle)` instead. topk_idx [T, K] and topk_weights
        float32 [T, K] are the source's, as for dispatch, in any order of a token's slots (another
        tensor than dispatch's takes some launches more); slots with a negative index do not count,
        nor do those of ranks that are masked by now (their rows must be numbers all the same).
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
        beside = (use_logfmt, zero_copy, async_finish, return_recv_hook, overlap)
        if src_signals is None:
            combined = self._combine_at_once(given, handle, beside)
            if combined is not None:
                return combined, EventOverlap(), None
        with NoGradients(), Call("low_latency_combine", self._pool, "combine") as call:
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
                # Without ranks that were masked since the dispatch, too.
                sizes = (plan.exchange.num_experts, plan.exchange.num_local_experts)
                routes, weights = self._mask.routes(topk_idx, *sizes), topk_weights
                if not handle.has_order_of(topk_idx):
                    own = self._mask.routes(handle.topk_idx, *sizes)
                    routes, weights = _in_order_of(own, routes, weights)
                if plan.exchange.is_between_gpu_domains:
                    routes, weights = None, topk_weights.masked_fill(routes < 0, 0.0)
                is_whole = out is not None and out.is_contiguous()
                with _NOTHING if waits is None else call.exchange.waits_added(waits, plan):
                    combined, _ = call.exchange.combine(
                        plan,
                        rows,
                        blocks=True,
                        scale="source",
                        source_weights=weights,
                        source_idx=routes,
                        out=out if is_whole else None,
                        num_sms=num_sms,
                        receives_later=return_recv_hook,
                        ready=ready,
                        wire="logfmt10" if use_logfmt else "none",
                    )
                receive = None
                if return_recv_hook and plan.exchange.is_open(plan):
                    receive = Receive(plan, waits, stream)
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
    ) -> Tensor | None:
        """The same of `low_latency_combine` as `_dispatch_at_once`; the tokens."""
        told = _core.num_told()
        try:
            if any(beside) or not tensors[4] is handle.hook is handle.order is None:
                return None
            runtime, plan = self._runtime(), handle.plan
            exchange = plan.exchange
            is_plain = isinstance(handle, LowLatencyHandle) and handle.has_order_of(tensors[1])
            if not (is_plain and self._is_plain(runtime.stream, exchange)):
                return None
            combined = exchange.combine_blocks_at_once(plan, tensors, handle.stride)
        except BaseException as error:
            if isinstance(error, Exception) and _core.num_told() == told:
                return None
            with Call("low_latency_combine", self._pool, "combine", told) as call:
                call.by(handle.plan)
                raise
        if combined is not None:
            runtime.exchanges.last = exchange
            count("low_latency_combine")
        return combined

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """bf16 [El, R * num_max, H] to write rows to for `low_latency_combine(zero_copy=True)`."""
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
        """A call leaves nothing behind that the next one must not see; hooks that were not called
        are forgotten."""
        with Call("clean_low_latency_buffer"):
            self._low_latency()
        self._hooks = LastHooks()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local, of all ranks. Masks a rank, or takes it in again. Needs enable_shrink=True.

        Where calls go on without lost ranks, from the first on, a masked rank is lost: the next one
        does not wait for it, its own raises `weft.PeerError`, and to take it in again raises
        `weft.Unsupported`. Elsewhere it still makes its calls, and its tokens, counts and sums are
        left out.
        """
        with Call("low_latency_update_mask_buffer"):
            self._check_shrink()
            most = self.group_size - 1
            is_rank = 0 <= rank_to_mask <= most
            check(is_rank, f"rank_to_mask = {rank_to_mask} (expected 0 to {most})")
            is_other = rank_to_mask != self.rank
            if mask and is_other and self._pool.mask([rank_to_mask]):
                self._mask.lose([rank_to_mask])
            else:
                self._mask.set(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Local. Fills mask_status int32 [R] with 1 for masked ranks, lost ones included, else
        0."""
        with Call("low_latency_query_mask_buffer"):
            self._check_shrink()
            check_tensor("mask_status", mask_status, torch.int32, [self.group_size])
        mask_status.copy_(self._mask.is_masked[:-1])

    def low_latency_clean_mask_buffer(self) -> None:
        """Local. Takes all ranks in again. Raises `weft.Unsupported` if some are lost."""
        with Call("low_latency_clean_mask_buffer"):
            self._check_shrink()
            self._mask.clear()

    def _block_ranks(self, num_experts: int) -> int:
        """The R of blocks for num_experts."""
        del num_experts
        return self.group_size

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
        """The event and the hook of a call that has been made, or with `receive` of its half."""
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


def _in_order_of(own: Tensor, given: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choices and weights of `given` [T, K], by expert in the places that `own` [T, K] has them; -1
    and 0 where it has none."""
    is_it = (own.unsqueeze(2) == given.unsqueeze(1)) & (given >= 0).unsqueeze(1)
    placed = torch.where(is_it, weights.unsqueeze(1), 0.0).sum(2)
    return own.masked_fill(~is_it.any(2), -1), placed


def _first_of(scale: Any) -> Any:
    """Callers give one number for all experts, or the same for each."""
    if not isinstance(scale, Tensor) or scale.shape == (1,):
        return scale
    return scale.reshape(-1)[:1]


def check_wire(hidden: int) -> None:
    """Raises BadCall unless sums of so many elements can travel as logfmt."""
    group = _core.QUANTISE_GROUP
    check(hidden % group == 0, f"use_logfmt for {hidden} columns of x (a multiple of {group})")


class RankMask:
    """Ranks that low-latency calls leave out.

    Those that are lost make no calls, and the exchanges do without them. Others still make theirs,
    and the mask keeps their tokens, counts and sums out. The host knows it, so a CUDA graph keeps
    the mask of its capture.
    """

    renumbers = False  # whether a call has other numbers for experts than its caller

    def __init__(self, num_ranks: int) -> None:
        self.is_masked = torch.zeros(num_ranks + 1, dtype=torch.bool, device="cpu")
        self.is_masked[-1] = True  # no rank
        self.has_any = False  # any rank is masked and not lost
        self._lost: set[int] = set()

    def lose(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._lost.add(rank)
            self.is_masked[rank] = True
        self._count()

    def set(self, rank: int, is_masked: bool) -> None:
        """Raises Unsupported for one that is lost and shall be taken in."""
        if not is_masked and rank in self._lost:
            raise Unsupported(f"rank {rank} is lost and cannot be taken in again", "unsupported")
        self.is_masked[rank] = is_masked
        self._count()

    def clear(self) -> None:
        """Raises Unsupported if some are lost."""
        for rank in range(len(self.is_masked) - 1):
            self.set(rank, False)

    def _count(self) -> None:
        self.has_any = int(self.is_masked.sum()) - 1 > len(self._lost)

    def of(self, ranks: Tensor) -> Tensor:
        """bool like ranks (any shape; R stands for none): where they are masked."""
        return self.is_masked.to(ranks.device)[ranks]

    def routes(self, topk_idx: Tensor, num_experts: int, num_local_experts: int) -> Tensor:
        """topk_idx [T, K] less those to masked ranks; -1 is none."""
        if not self.has_any:
            return topk_idx
        routes = routes_of(topk_idx, num_experts)
        return routes.masked_fill(self.of(routes.clamp(min=0).long() // num_local_experts), -1)

    def waits(self, sums: Tensor | None) -> Tensor | None:
        """Of statistics of waits the part for the ranks of the call."""
        return sums
