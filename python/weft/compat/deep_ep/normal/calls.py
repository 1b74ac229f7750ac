# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine of a `Buffer`: a row for each (token, rank), by source rank, then token."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch

from weft import Dispatched, Exchange, Plan

from .checks import refused_by_all
from .config import Config
from .events import EventOverlap, event_of
from .handle import Handle
from .handle_hosts import handle_of
from .layout import (
    MAX_TOPK,
    Layout,
    check_experts,
    check_topk,
    layout_of,
    routes_of,
    routes_to_ranks,
)
from .normal_checks import (
    biases_of,
    check_alignment,
    check_capacity,
    check_handle,
    check_layout,
    check_repeats,
    check_routing,
    check_rows,
    experts_of,
)
from .payload import Payload
from .received import received_topk
from .runtime import Runtime

Tensor = torch.Tensor

_MIN_TOKENS = 4096  # that an exchange starts with room for
_MIN_TOPK = 8


class NormalMode:
    """The part of `Buffer` whose number of rows follows from the routing."""

    rank: int
    group_size: int
    _runtime: Callable[[str], Runtime]
    _num_sms: Callable[..., int]
    _num_channels: Callable[[Config | None], int]

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Local. Counts of topk_idx [T, K]; values outside [0, num_experts) do not count.

        Returns num_tokens_per_rank int32 [R], num_tokens_per_rdma_rank int32 [hosts] (None for
        one host; `Hosts` says what that is), num_tokens_per_expert int32 [E], is_token_in_rank
        bool [T, R], event. A token counts once for a rank, and once for a host.
        """
        runtime = self._runtime("get_dispatch_layout")
        check_topk("get_dispatch_layout", topk_idx)
        check_experts("get_dispatch_layout", num_experts, self.group_size)
        with runtime.stream.call(
            topk_idx.device,
            (topk_idx,),
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        ) as call:
            layout = layout_of(topk_idx, num_experts, runtime.hosts)
            call.returns(*layout)
        return *layout, event_of(call)

    @torch.no_grad()
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, ...],
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """Collective. Each token to every rank that has one of its experts, once.

        x [T, H] of bf16, fp16, fp32 or one byte; (FP8 [T, H], scales float32 or int32 [T, any],
        any strides); or the three tensors of NVFP4. Row bytes are a multiple of 16. topk_idx [T, K]
        int64, K up to 32, values outside [0, E) are no choice; topk_weights float32 [T, K].
        Without them the layout alone says where tokens go. T may differ between ranks.
        num_tokens_per_rdma_rank is not needed, only checked.

        Returns (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
        event). recv_x [N, H] like x, rows by source rank, then token. recv_topk_idx int64 [N, K]:
        this rank's experts from 0, -1 for those of others; recv_topk_weights 0 there. The list
        counts choices of each local expert, rounded up to expert_alignment; rows are not padded.

        num_worst_tokens: N is that number and nothing waits for the GPU (needs top-k); the list is
        empty, rows beyond the real count have recv_topk_idx -1 and are otherwise undefined. It must
        be large enough on every rank; tokens beyond it are dropped.

        handle of an earlier dispatch: the same way again, with the same T, without top-k; returns
        (recv_x, None, None, None, None, event).
        """
        runtime = self._runtime("dispatch")
        payload = Payload("dispatch", x)
        num_sms = self._num_sms("dispatch", config, payload.device)
        streams = {
            "previous_event": previous_event,
            "async_finish": async_finish,
            "allocate_on_comm_stream": allocate_on_comm_stream,
        }
        if handle is not None:
            check_handle("dispatch", handle)
            with refused_by_all(lambda: _nothing(handle.plan, Exchange.dispatch)):
                check_repeats(payload, handle, topk_idx, topk_weights)
            with runtime.stream.call(payload.device, payload.tensors, **streams) as call:
                again = functools.partial(
                    handle.plan.exchange.dispatch, handle.plan, num_sms=num_sms
                )
                recv_x, _, _ = payload.send(again)
                call.returns(*_tensors(recv_x))
            return recv_x, None, None, None, None, event_of(call)

        layout = Layout(
            num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank
        )
        exchange = _exchange(runtime, payload, layout, topk_idx, num_worst_tokens)
        options = {"layout": "rank_major", "row_budget": num_worst_tokens or None}
        with refused_by_all(lambda: exchange.plan(**options)):
            check_layout(layout, payload.num_tokens, runtime.hosts)
            check_routing(topk_idx, topk_weights, payload.num_tokens, num_worst_tokens)
            check_alignment(expert_alignment)
            check_capacity(payload, num_worst_tokens, exchange.max_tokens)
        inputs = (*payload.tensors, *layout, topk_idx, topk_weights)
        with runtime.stream.call(payload.device, inputs, **streams) as call:
            if topk_idx is None:
                routes = routes_to_ranks(is_token_in_rank, exchange.num_local_experts)
            else:
                routes = routes_of(topk_idx, exchange.num_experts)
            plan = recv_idx = ids = None

            def send(*given: Tensor | None) -> Dispatched:
                nonlocal plan
                plan, out = exchange.plan_and_dispatch(routes, *given, num_sms=num_sms, **options)
                return out

            if topk_idx is None:
                recv_x, recv_weights, _ = payload.send(send)
            else:
                beside = (routes.to(torch.int32),)
                recv_x, recv_weights, (ids,) = payload.send(send, topk_weights, beside)
                recv_idx = received_topk(plan, ids.long())
            channels = self._num_channels(config)
            handle = handle_of(plan, is_token_in_rank, ids, channels, runtime.hosts)
            counts = [] if num_worst_tokens > 0 else _counts(runtime, handle, layout)
            call.returns(*_tensors(recv_x), recv_idx, recv_weights, ids)
        counts = [-(-count // expert_alignment) * expert_alignment for count in counts]
        return recv_x, recv_idx, recv_weights, counts, handle, event_of(call)

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Collective. The rows of a dispatch back to their tokens, summed over ranks, unweighted.

        x [N, H] bf16 (fp16 and fp32 too), the rows of the dispatch that made `handle`; topk_weights
        float32 [N, K]; bias: one or two tensors [T, H] of x's dtype, on every rank or on none.
        Returns combined_x [T, H]: sums in fp32, by rank, then the bias, rounded once (without bias
        and among several domains: in each of them, and their sum); zeros (and bias) for a token
        that went nowhere. combined_topk_weights float32 [T, K]: of each slot the
        value of the rank that has its expert, or None. event.
        """
        runtime = self._runtime("combine")
        check_handle("combine", handle)
        plan = handle.plan
        with refused_by_all(lambda: _nothing(plan, Exchange.combine)):
            biases = biases_of(bias)
            check_rows(x, handle, topk_weights, biases)
            num_sms = self._num_sms("combine", config, x.device)
        with runtime.stream.call(
            x.device,
            (x, topk_weights, *biases),
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        ) as call:
            rows = x.float() if biases else x
            combined, weights = plan.exchange.combine(plan, rows, topk_weights, num_sms=num_sms)
            for one in biases:
                combined += one
            combined = combined.to(x.dtype)
            call.returns(combined, weights)
        return combined, weights, event_of(call)


def _exchange(
    runtime: Runtime,
    payload: Payload,
    layout: Layout,
    topk_idx: Tensor | None,
    num_worst_tokens: int,
) -> Exchange:
    """Collective if it has to be made."""
    num_ranks = runtime.group.num_ranks
    if topk_idx is not None:
        check_topk("dispatch", topk_idx)
    return runtime.exchanges.get(
        hidden=payload.hidden,
        num_experts=experts_of(layout, num_ranks),
        device=payload.device,
        # Without a wait for the GPU the exchange cannot learn of more tokens and grow by itself.
        max_tokens=max(_MIN_TOKENS, -(-num_worst_tokens // num_ranks)),
        max_topk=max(_MIN_TOPK, min(num_ranks, MAX_TOPK) if topk_idx is None else topk_idx.size(1)),
    )


def _nothing(plan: Plan, operation: Callable[..., Any]) -> None:
    """Collective: dispatches or combines rows of a shape that is refused."""
    operation(plan.exchange, plan, torch.empty((0, 1), device=plan.exchange.device))


def _counts(runtime: Runtime, handle: Handle, layout: Layout) -> list[int]:
    """Choices of this rank's experts. Waits for the GPU, as the plan did."""
    if handle.has_topk:
        return handle.plan.rows_per_expert_list
    here = layout.num_tokens_per_expert.tolist()
    form = struct.Struct(f"<{len(here)}i")
    blocks = [form.unpack(block) for block in runtime.group.all_gather(form.pack(*here))]
    local = len(here) // len(blocks)
    first = runtime.group.rank * local
    return [sum(block[expert] for block in blocks) for expert in range(first, first + local)]


def _tensors(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
