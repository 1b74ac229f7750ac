# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine of a `Buffer`: a row for each (token, rank), by source rank, then token.
payload.py sends them."""

from collections.abc import Callable

import torch
from torch import Tensor

from weft import Exchange

from ..checks import (
    FLOATS,
    MAX_TOPK,
    check,
    check_experts,
    check_handle,
    check_least,
    check_routing,
    check_tensor,
    check_topk,
    refused_by_all,
)
from ..config import Config
from ..events import EventOverlap, event_of
from ..layout import Hosts, Layout, layout_of, routes_of, routes_to_ranks
from ..payload import Payload, received_topk, round_up
from ..runtime import MIN_TOKENS, MIN_TOPK, Runtime
from .handle import Handle, handle_of


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
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        with runtime.stream.call(topk_idx.device, (topk_idx,), *streams) as call:
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
        Without them only the layout says where tokens go. T may differ between ranks.
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
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            check_handle("dispatch", handle, Handle)
            with refused_by_all(handle.plan.exchange, "dispatch", handle.plan):
                _check_repeats(payload, handle, topk_idx, topk_weights)
            with runtime.stream.call(payload.device, payload.tensors, *streams) as call:
                plan = handle.plan
                _, recv_x, _, _ = payload.send(plan.exchange, plan, num_sms=num_sms)
                call.returns(*_tensors(recv_x))
            return recv_x, None, None, None, None, event_of(call)

        layout = Layout(
            num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank
        )
        exchange = _exchange(runtime, payload, layout, topk_idx, num_worst_tokens)
        options = {"layout": "rank_major", "row_budget": num_worst_tokens or None}
        with refused_by_all(exchange, **options):
            _check_layout(layout, payload.num_tokens, runtime.hosts)
            _check_routing(topk_idx, topk_weights, payload.num_tokens, num_worst_tokens)
            check_least("dispatch: expert_alignment", expert_alignment)
            # A call that nobody waits for must have room for this rank's tokens.
            num_tokens, most, is_gpu = payload.num_tokens, exchange.max_tokens, payload.is_gpu
            check(
                num_worst_tokens == 0 or not is_gpu or num_tokens <= most,
                f"dispatch: x has {num_tokens} rows with num_worst_tokens = {num_worst_tokens} "
                f"(expected at most {most}: num_worst_tokens is less than the rows of a rank)",
            )
        inputs = (*payload.tensors, *layout, topk_idx, topk_weights)
        with runtime.stream.call(payload.device, inputs, *streams) as call:
            if topk_idx is None:
                routes = routes_to_ranks(is_token_in_rank, exchange.num_local_experts)
            else:
                routes = routes_of(topk_idx, exchange.num_experts)
            recv_idx = ids = None
            if topk_idx is None:
                plan, recv_x, recv_weights, _ = payload.send(
                    exchange, routes, num_sms=num_sms, **options
                )
            else:
                beside = (routes.to(torch.int32),)
                plan, recv_x, recv_weights, (ids,) = payload.send(
                    exchange, routes, topk_weights, beside, num_sms=num_sms, **options
                )
                recv_idx = received_topk(plan, ids.long())
            channels = self._num_channels(config)
            handle = handle_of(plan, is_token_in_rank, ids, channels, runtime.hosts)
            counts = [] if num_worst_tokens > 0 else _counts(runtime, handle, layout)
            call.returns(*_tensors(recv_x), recv_idx, recv_weights, ids)
        counts = [round_up(count, expert_alignment) for count in counts]
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
        check_handle("combine", handle, Handle)
        plan = handle.plan
        with refused_by_all(plan.exchange, "combine", plan):
            biases = _biases_of(bias)
            _check_rows(x, handle, topk_weights, biases)
            num_sms = self._num_sms("combine", config, x.device)
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        with runtime.stream.call(x.device, (x, topk_weights, *biases), *streams) as call:
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
        num_experts=_experts_of(layout, num_ranks),
        device=payload.device,
        # Without a wait for the GPU the exchange cannot learn of more tokens and grow by itself.
        max_tokens=max(MIN_TOKENS, -(-num_worst_tokens // num_ranks)),
        max_topk=max(MIN_TOPK, min(num_ranks, MAX_TOPK) if topk_idx is None else topk_idx.size(1)),
    )


def _counts(runtime: Runtime, handle: Handle, layout: Layout) -> list[int]:
    """Choices of this rank's experts. Waits for the GPU, as the plan did."""
    if handle.has_topk:
        return handle.plan.rows_per_expert_list
    here = layout.num_tokens_per_expert.tolist()
    blocks = runtime.group.gather_numbers(*here)
    local = len(here) // len(blocks)
    first = runtime.group.rank * local
    return [sum(block[expert] for block in blocks) for expert in range(first, first + local)]


def _tensors(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _experts_of(layout: Layout, num_ranks: int) -> int:
    """The number of experts, which only num_tokens_per_expert tells."""
    per_expert = layout.num_tokens_per_expert
    _check_given("num_tokens_per_expert", per_expert)
    check(
        per_expert.dim() == 1,
        f"dispatch: num_tokens_per_expert has shape {list(per_expert.shape)} (expected [E])",
    )
    check_experts("dispatch", per_expert.size(0), num_ranks)
    return per_expert.size(0)


def _check_layout(layout: Layout, num_tokens: int, hosts: Hosts) -> None:
    """The layout is that of `get_dispatch_layout`, given back."""
    per_rank, per_host, per_expert, in_rank = layout
    for name, tensor, dtype, shape in (
        ("num_tokens_per_rank", per_rank, torch.int32, [hosts.num_ranks]),
        ("num_tokens_per_expert", per_expert, torch.int32, per_expert.shape),
        ("is_token_in_rank", in_rank, torch.bool, [num_tokens, hosts.num_ranks]),
    ):
        _check_given(name, tensor)
        check_tensor(f"dispatch: {name}", tensor, dtype, shape)
    if hosts.are_several:
        name = "dispatch: num_tokens_per_rdma_rank"
        check_tensor(name, per_host, torch.int32, [hosts.num_hosts])


def _check_given(name: str, tensor: Tensor | None) -> None:
    check(
        tensor is not None,
        f"dispatch: {name} is None (without a handle get_dispatch_layout's results are needed)",
    )


def _check_routing(
    topk_idx: Tensor | None, topk_weights: Tensor | None, num_tokens: int, num_worst_tokens: int
) -> None:
    """Top-k and weights come together, or not at all."""
    worst = f"dispatch: num_worst_tokens = {num_worst_tokens}"
    check_least("dispatch: num_worst_tokens", num_worst_tokens, 0)
    check(
        (topk_idx is None) == (topk_weights is None),
        "dispatch: one of topk_idx and topk_weights is None (give both or neither)",
    )
    if topk_idx is None:
        check(num_worst_tokens == 0, f"{worst} without top-k (it needs topk_idx)")
        return
    check_routing("dispatch", topk_idx, topk_weights, num_tokens)


def _check_repeats(
    payload: Payload, handle: Handle, topk_idx: Tensor | None, topk_weights: Tensor | None
) -> None:
    """`payload` can go the way of the dispatch that made `handle`."""
    check(
        topk_idx is None and topk_weights is None,
        "dispatch: top-k is given beside a handle (which stands for it)",
    )
    for given, what, wanted in (
        (payload.num_tokens, "rows", handle.plan.num_tokens),
        (payload.hidden, "columns", handle.plan.exchange.hidden),
    ):
        check(
            given == wanted,
            f"dispatch: x has {given} {what} (expected {wanted}, the handle's)",
        )


def _check_rows(
    x: Tensor, handle: Handle, topk_weights: Tensor | None, biases: tuple[Tensor, ...]
) -> None:
    """x, weights and biases are what `combine` can bring back."""
    plan = handle.plan
    hidden = plan.exchange.hidden
    check(x.dtype in FLOATS, f"combine: x has dtype {x.dtype} (expected torch.bfloat16)")
    check_tensor("combine: x", x, x.dtype, [plan.num_rows, hidden])
    for bias in biases:
        check_tensor("combine: bias", bias, x.dtype, [plan.num_tokens, hidden])
    if topk_weights is not None:
        check(
            handle.has_topk,
            "combine: topk_weights are given (the dispatch of this handle had no top-k)",
        )
        shape = [plan.num_rows, plan.topk]
        check_tensor("combine: topk_weights", topk_weights, torch.float32, shape)


def _biases_of(bias: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if bias is None:
        return ()
    if isinstance(bias, torch.Tensor):
        return (bias,)
    check(
        isinstance(bias, tuple) and len(bias) == 2,
        f"combine: bias is {type(bias).__name__} (expected None, a tensor or a tuple of two)",
    )
    return tuple(one for one in bias if one is not None)
