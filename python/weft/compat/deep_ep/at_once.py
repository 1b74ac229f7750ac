# SPDX-License-Identifier: Apache-2.0
"""Normal calls of a `Buffer` in the common case: on the current stream, among ranks of one host, of
rows that combine can sum, or FP8 with scales. Each is then one call of the core, which has the
rules; buffer.py makes all other calls in steps, refused ones included."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft import _core, ranges
from weft.run.calls import count

from .config import Config
from .handles import Handle
from .payload import Rows
from .runtime import MIN_TOKENS, MIN_TOPK, ExchangePool, Runtime, found_at_once
from .utils.event import EventOverlap


class CallsAtOnce:
    """The part of `Buffer` that makes the common calls. Each method returns None, with nothing
    begun, for an uncommon call or wrong arguments."""

    group_size: int
    enable_shrink: bool
    runtime: Runtime | None
    sums_topk_weights: bool
    _pool: ExchangePool | None
    _num_sms: Callable[[Config | None], int]

    def _layout_at_once(self, topk_idx: Tensor, num_experts: int) -> tuple | None:
        """Makes the layout."""
        try:
            runtime = self.runtime
            if ranges.IS_ON or runtime.hosts.are_several:
                return None
            stream = runtime.stream.current(topk_idx.get_device())
            if stream is None:
                return None
            layout = _core.dispatch_layout(topk_idx, num_experts, self.group_size, stream)
        except Exception:
            return None
        count("get_dispatch_layout")
        return *layout, EventOverlap()

    def _rows_at_once(
        self,
        name: str,
        tensors: tuple[Rows, Tensor, Tensor],
        layout: tuple[Tensor | None, ...] | int,
        config: Config | None,
        alignment: int = 1,
    ) -> tuple | None:
        """Does `dispatch` of x, topk_idx and topk_weights by a layout, or `dispatch_by_topk` where
        layout is the number of experts."""
        told, exchange = _core.num_told(), None
        try:
            runtime = self.runtime
            pool, hosts = runtime.exchanges, runtime.hosts
            exchange = pool.planned.get(False)
            if exchange is None or hosts.are_several or self.enable_shrink:
                return None
            stream = runtime.stream.current(exchange.gpu)
            has_room = exchange.max_tokens >= MIN_TOKENS and exchange.max_topk >= MIN_TOPK
            if stream is None or not has_room:
                return None
            num_sms = self._num_sms(config)
            how = (layout, alignment)
            made = exchange.dispatch_at_once("dispatch_rows", tensors, how, num_sms, stream)
        except BaseException as error:
            return found_at_once(error, told, name, self._pool, by=exchange, layout="rank_major")
        if made is None:
            return None
        pool.last = exchange
        count(name)
        plan, (rows, weights, scales, experts, _, _), counts = made
        moved = rows if scales is None else (rows, scales)
        in_rank = layout[3] if type(layout) is tuple else None
        handle = Handle(plan, in_rank, True, None, num_sms // 2, hosts)
        return moved, experts, weights, counts, handle, EventOverlap()

    def _rows_again_at_once(self, x: Rows, handle: Handle, config: Config | None) -> tuple | None:
        """Dispatches by a handle."""
        told = _core.num_told()
        try:
            stream = self._stream_of(handle)
            if stream is None:
                return None
            plan = handle.plan
            rows = plan.exchange.dispatch_again_at_once(plan, x, self._num_sms(config), stream)
        except BaseException as error:
            return found_at_once(error, told, "dispatch", self._pool, "dispatch", handle)
        if rows is None:
            return None
        self.runtime.exchanges.last = plan.exchange
        count("dispatch")
        return rows, None, None, None, None, EventOverlap()

    def _sums_at_once(
        self, x: Tensor, handle: Handle, weights: Tensor | None, config: Config | None
    ) -> tuple | None:
        """Combines."""
        told = _core.num_told()
        try:
            stream = self._stream_of(handle)
            has_more = weights is not None and (self.sums_topk_weights or not handle.has_topk)
            if stream is None or has_more:
                return None
            plan, num_sms = handle.plan, self._num_sms(config)
            made = plan.exchange.combine_rows_at_once(plan, x, weights, num_sms, stream)
        except BaseException as error:
            return found_at_once(error, told, "combine", self._pool, "combine", handle)
        if made is None:
            return None
        self.runtime.exchanges.last = plan.exchange
        count("combine")
        return *made, EventOverlap()

    def _stream_of(self, handle: Handle) -> int | None:
        """Returns the stream for a handle."""
        if not isinstance(handle, Handle) or self.enable_shrink:
            return None
        return self.runtime.stream.current(handle.plan.exchange.gpu)
