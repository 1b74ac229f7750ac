# SPDX-License-Identifier: Apache-2.0
"""`EPBuffer`: the interface of DeepEP 2.5, on Weft exchanges.

Same names, arguments and results, sums included: returns.py has their order. docs/compat.md has
what differs. Results carry no gradient.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group, Plan
from weft.streams import known_to

from .. import comm
from ..checks import check, check_handle, check_tensor
from ..elastic import model
from ..elastic.base import BufferBase
from ..payload import Payload, Received, Rows, biases_of, parts_of, round_up
from ..runtime import Call, ExchangePool, without_gradients
from ..utils.envs import get_sm_read_gbs, get_sm_write_gbs
from ..utils.event import EventOverlap, event_of
from .allocator import BufferAllocator
from .balance import ExpertCopies
from .handle import EPBufferHandle
from .returns import Returns, places_of_choices, places_of_ranks, plan_returns


class Runtime(ExchangePool):
    """Exchanges of a buffer. lb_storage uint8 [num_lb_bytes]: for copies of experts, on the GPU if
    there is one."""

    def __init__(self, group: Group, timeout: float, num_lb_bytes: int) -> None:
        super().__init__(group, timeout)
        self.copies = ExchangePool(group, timeout)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.lb_storage = torch.empty(num_lb_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        super().close()
        self.copies.close()


class EPBuffer(ExpertCopies, BufferBase):
    """Moves tokens to the ranks of their experts and back, on the process's communication stream.

    Collective. num_max_tokens_per_rank: the default of `dispatch`, the same on all ranks.
    num_bytes: a multiple of 2 MiB, None for `get_buffer_size_hint`; memory grows as it is needed,
    so this is for callers to compare. lb_allocation_plan_or_num_bytes: room for copies of experts,
    a multiple of 2 MiB, or a `BufferAllocator`, whose tensors are there from then on.
    num_gpu_timeout_secs: of every wait for another rank. explicitly_destroy: `destroy()` will be
    called. Calls raise InvalidArgument (also an AssertionError).
    """

    handle_class = EPBufferHandle

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        del sl_idx, num_cpu_timeout_secs  # the network's; a wait of the host ends with the GPU's
        modes = (allow_hybrid_mode, allow_multiple_reduction)
        super().__init__(
            group,
            num_max_tokens_per_rank,
            deterministic,
            *modes,
            prefer_overlap_with_compute,
            num_allocated_qps,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )
        ranks = self.pool().group

        def settle() -> tuple[int, int]:
            size = num_bytes
            if size is None:
                sizes = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
                size = self.get_buffer_size_hint(group, *sizes, *modes)
            _check_bytes("num_bytes", size, least=1)
            return size, _lb_bytes(lb_allocation_plan_or_num_bytes)

        self.num_bytes, self.num_lb_bytes = ranks.agreed("EPBuffer", settle)
        self.runtime: Runtime | None = Runtime(ranks, num_gpu_timeout_secs, self.num_lb_bytes)
        self.context: Any = self.runtime
        self._comm = comm.STREAM
        if isinstance(lb_allocation_plan_or_num_bytes, BufferAllocator):
            lb_allocation_plan_or_num_bytes.materialize(self.runtime.lb_storage)

    @property
    def main_context(self) -> Any:
        """The calls' runtime; None after `destroy`."""
        return self.context

    def destroy(self) -> None:
        """Frees the memory; the buffer refuses later calls.

        AssertionError unless the buffer was made with explicitly_destroy.
        """
        super().destroy()
        self.context = None

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns bytes, a multiple of 2 MiB, growing with every size. num_topk 0: 32.
        AssertionError without tokens, or for a hidden size whose factors are more than its rows."""
        del allow_hybrid_mode  # as much either way
        check(
            num_max_tokens_per_rank > 0,
            f"num_max_tokens_per_rank = {num_max_tokens_per_rank} (expected at least 1)",
        )
        check(
            hidden > 0 and math.ceil(hidden / 32) * 4 <= hidden,
            f"hidden = {hidden} (expected at least 4)",
        )
        sizes = (group.size(), num_max_tokens_per_rank, hidden, num_topk)
        return model.larger_call_bytes(*sizes, use_fp8_dispatch, allow_multiple_reduction)

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Collective. Ends all work queued before, on any rank, before later work.

        The host waits, always: with_cpu_sync for the whole GPU, else for the current stream, and
        with wait_comm_stream for the communication stream too.
        """
        del sequential, context_idx
        if wait_comm_stream and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self._barrier(wait_comm_stream, with_cpu_sync)

    def print_memory_usage(self) -> None:
        """Prints, on the first rank, the buffer's nominal bytes, and those that calls hold."""
        held = self.pool().footprint()
        if self.rank_idx == 0:
            held = {**held, "num_bytes": self.num_bytes, "num_lb_bytes": self.num_lb_bytes}
            print("EPBuffer: " + ", ".join(f"{name} {size}" for name, size in held.items()))

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Returns SMs for dispatch and combine by a model of traffic to random experts.

        Rates in GB/s, 0: detected. Calls take Weft's measured number unless given this one.
        AssertionError if num_scaleout_topk is not 0, or experts cannot be shared out equally.
        """
        ranks = self._ranks_of_model(num_experts, num_topk, num_scaleout_topk)
        links = (rdma_gbs or model.rdma_gbs(), nvlink_gbs or model.nvlink_gbs())
        each = (sm_read_gbs or get_sm_read_gbs(), sm_write_gbs or get_sm_write_gbs())
        return model.theoretical_num_sms_of_both(
            num_experts,
            num_topk,
            ranks,
            model.Rates(*links, *each),
            model.device_sms(),
            self.prefer_overlap_with_compute,
        )

    def _check_arguments(
        self, num_sms: int, num_qps: int, previous_event: Any, *flags: bool
    ) -> int:
        """Checks arguments of dispatch and combine. flags: allocate_on_comm_stream,
        async_with_compute_stream, defer_epilogue. Returns num_sms as an even number."""
        allocates, is_async, is_deferred = flags
        check(
            num_qps <= self.num_allocated_qps,
            f"num_qps = {num_qps} of {self.num_allocated_qps}: Allocated QPs are not enough",
        )
        self._check_call(num_qps, previous_event, allocates)
        check(
            is_async or not is_deferred,
            "defer_epilogue without async_with_compute_stream (expected both)",
        )
        check(num_sms >= 0, f"num_sms = {num_sms} (expected at least 0)")
        return round_up(num_sms, 2)

    @without_gradients
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPBufferHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
        *,
        emit_expert_ids: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPBufferHandle, EventOverlap] | EventOverlap:
        """Collective. Sends tokens to experts.

        x [T, H] bf16, fp16 or fp32, or (FP8 [T, H], scaling factors [T, S] of any strides).
        topk_idx int64 or int32 [T, K], -1 = no expert; it must not be written to while the handle
        is in use. topk_weights fp32 [T, K] or None; num_experts. T may
        differ between ranks and be 0, up to num_max_tokens_per_rank, which does not.
        Or the handle of an earlier call, whose choices are used again, with or without weights;
        do_expand as there.
        cumulative_local_expert_recv_stats int32 [El]: the choices of each local expert are added,
        except with a handle.
        do_expand: one row for each choice, by local expert (each rounded up to expert_alignment
        rows, padding zero), then source rank and token; else one row for each token on each rank,
        by source rank, then token. do_zero_padding: needs do_expand.
        do_cpu_sync: None and True: as many rows as arrive, which the host waits for. False: as many
        as could arrive, without a wait; what is past those that did is undefined.
        num_sms: SMs to use, 0: by Weft's measured table.
        previous_event: when to begin, instead of after the current stream's work; needs
        allocate_on_comm_stream. async_with_compute_stream: the current stream does not wait.
        use_tma_aligned_col_major_sf: received scaling factors have adjacent columns, each beginning
        at a multiple of 16 bytes. emit_expert_ids: with do_expand, `handle.recv_expert_ids`.

        Returns (rows, topk_idx, weights, handle, event): rows like x; topk_idx int64 [N, K], local
        experts or -1, None with do_expand; weights fp32 [N, K], 0 where topk_idx is -1, or [N] with
        do_expand; None if not given. The handle is the given one, or new. With defer_epilogue the
        event alone, whose wait returns the other four.
        """
        stats = cumulative_local_expert_recv_stats
        flags = (allocate_on_comm_stream, async_with_compute_stream, defer_epilogue)
        verb = "plan_and_dispatch" if handle is None else "dispatch"
        has_cpu_sync = do_cpu_sync is None or do_cpu_sync
        wants = {"layout": "rank_major", "row_budget": None if has_cpu_sync else 0}
        with Call("dispatch", self.runtime, verb, **wants) as call:
            if handle is not None:
                call.by(check_handle(handle, EPBufferHandle).plan)
                _ = handle.topk_idx  # which may not have changed
            num_sms = self._check_arguments(num_sms, num_qps, previous_event, *flags)
            check(not do_handle_copy, "do_handle_copy = True (a handle is not copied any more)")
            check(do_expand or not do_zero_padding, "do_zero_padding without do_expand")
            check(
                not emit_expert_ids or (do_expand and handle is None),
                "emit_expert_ids without do_expand, or with a handle",
            )
            payload = Payload(x, scales=None)
            given = {
                "expert_alignment": expert_alignment,
                "num_max_tokens_per_rank": num_max_tokens_per_rank,
                "do_expand": bool(do_expand),
            }
            self._check_choices(handle, topk_idx, num_experts, do_cpu_sync, given)
            inputs = (*payload.tensors, topk_idx, topk_weights, stats)
            with self._comm.call(
                payload.device, inputs, previous_event, async_with_compute_stream
            ) as work:
                most = num_max_tokens_per_rank
                *received, handle = self._move(
                    call,
                    payload,
                    handle,
                    (topk_idx, topk_weights, num_experts, stats),
                    use_tma_aligned_col_major_sf,
                    do_expand=bool(do_expand),
                    expert_alignment=1 if expert_alignment is None else expert_alignment,
                    num_max_tokens_per_rank=self.num_max_tokens_per_rank if most is None else most,
                    num_sms=num_sms,
                    has_cpu_sync=has_cpu_sync,
                )
                if emit_expert_ids:
                    handle.recv_expert_ids = handle.expert_of_rows()
                work.returns(handle.sources, handle.ids, handle.recv_expert_ids)
                work.returns(*parts_of(received[0]), *received[1:])
        result = (*received, handle)
        if defer_epilogue:
            return _deferred(event_of(work), functools.partial(_handed_on, result))
        return *result, event_of(work)

    def _places_per_token(self, topk: int, do_expand: bool) -> int:
        """Number of a token's places in the plan by which rows return: see `Places`."""
        is_by_choice = do_expand and not self.allow_multiple_reduction
        return topk if is_by_choice else min(topk, self.num_ranks)

    def _first(
        self, call: Call, payload: Payload, routing: tuple, **settings: Any
    ) -> tuple[EPBufferHandle, Received]:
        """Collective. Dispatches; plans the return."""
        handle, out = super()._first(call, payload, routing, **settings)
        topk_idx, _, num_experts, _ = routing
        do_expand, plan = settings["do_expand"], out.plan
        call.by(plan, then="plan")
        options: dict[str, Any] = {"layout": "rank_major", "row_budget": plan.num_rows}
        has_domains = self.num_scaleout_ranks > 1 and self.allow_multiple_reduction
        if do_expand and not self.allow_multiple_reduction:
            places = places_of_choices(topk_idx)
            options |= {"layout": "expert_major", "pad_multiple": plan.pad_multiple}
        else:
            per_domain = self.num_scaleup_ranks if has_domains else 1
            num_local = num_experts // self.num_ranks
            places = places_of_ranks(topk_idx, num_local, self.num_ranks, per_domain)
            if do_expand:
                rows = self.num_ranks * settings["num_max_tokens_per_rank"]
                options["row_budget"] = None if settings["has_cpu_sync"] else rows
        handle.returns = plan_returns(call, places, has_domains, **options)
        if do_expand and self.allow_multiple_reduction:
            _ = handle.lines  # a replayed CUDA graph must make it anew
        return handle, out

    def _returns_of_width(self, call: Call, handle: EPBufferHandle, hidden: int) -> Returns:
        """Collective. Plans the return of rows of another width than dispatch sent, such as experts
        make of packed rows."""
        returns, topk = handle.returns, handle.ids.size(1)
        call.by(returns.plan, then="plan")
        _agree(returns.plan)
        if hidden not in handle.of_width:
            most = max(handle.num_max_tokens_per_rank, 1)
            most *= self._places_per_token(topk, handle.do_expand)
            key = (hidden, handle.num_experts, handle.sources.device)
            call.plans(key, most, topk, **returns.options)
            handle.of_width[hidden] = plan_returns(
                call, returns.places, returns.has_domains, **returns.options
            )
        return handle.of_width[hidden]

    @without_gradients
    def combine(
        self,
        x: Tensor,
        handle: EPBufferHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | EventOverlap:
        """Collective. Sums rows, in `dispatch`'s order, unweighted into their tokens.

        x [rows, H] bf16, fp16 or fp32, with do_expand of any number of rows. H may be another than
        that of dispatch, on all ranks: that takes one more plan, and outside of a capture the host
        waits for the GPU. topk_weights fp32 like those of `dispatch`; bias: one or two [T, H].
        Sums are in fp32: of the biases, then of what each rank has, ranks in the order of the last
        choice that goes to them; rounded once. With do_expand a rank first adds up its rows in the
        order of choices, and rounds; or all rows are added in the order of choices, rounded once,
        if the buffer was made without allow_multiple_reduction. Between domains, in hybrid mode
        with allow_multiple_reduction, sums of a domain are rounded and then added up, domains in
        the order of the last choice that goes to them.
        Streams and events as for `dispatch`. With defer_epilogue rows return at once and are added
        up by the event's wait, which reads the bias.

        Returns (tokens [T, H], weights fp32 [T, K] or None, event): zeros for a token without rows
        (plus bias), and for a weight without a choice. With defer_epilogue the event alone, whose
        wait returns the other two.
        """
        flags = (allocate_on_comm_stream, async_with_compute_stream, defer_epilogue)
        with Call("combine", self.runtime, "combine") as call:
            returns = check_handle(handle, EPBufferHandle).returns
            plan = call.by(returns.plan)
            num_sms = self._check_arguments(num_sms, num_qps, previous_event, *flags)
            num_tokens = handle.topk_idx.size(0)
            check_tensor("x", x, None, ["rows", "H"])
            biases = biases_of(bias, None, [num_tokens, x.size(1)])
            _check_weights(topk_weights, x, handle)
            inputs = (x, topk_weights, *biases)
            with self._comm.call(
                x.device, inputs, previous_event, async_with_compute_stream
            ) as work:
                if x.size(1) != plan.exchange.hidden:
                    returns = self._returns_of_width(call, handle, x.size(1))
                    plan = call.by(returns.plan, then="combine")
                rows, weights = _by_place(x, topk_weights, handle)
                num_sms = (num_sms or handle.num_sms) if x.is_cuda else 0
                back = call.exchange.combine(plan, rows, weights, num_sms=num_sms)
                finish = functools.partial(_finish, returns, *back, biases)
                work.returns(*back)
                if not defer_epilogue:
                    result = finish()
                    work.returns(*result)
        if defer_epilogue:
            return _deferred(event_of(work), finish)
        return *result, event_of(work)


def _check_bytes(name: str, size: int, least: int = 0) -> None:
    check(
        size >= least and size % model.ALIGNMENT == 0,
        f"{name} = {size} (expected a multiple of {model.ALIGNMENT}, at least {least})",
    )


def _lb_bytes(given: BufferAllocator | int) -> int:
    if isinstance(given, BufferAllocator):
        check(not given.materialized, "the allocator has been materialized already")
        return given.num_bytes
    _check_bytes("lb_allocation_plan_or_num_bytes", given)
    return given


def _check_weights(topk_weights: Tensor | None, x: Tensor, handle: EPBufferHandle) -> None:
    if topk_weights is not None:
        shape = [x.size(0)] if handle.do_expand else [x.size(0), handle.plan.topk]
        check_tensor("topk_weights", topk_weights, torch.float32, shape)


def _by_place(
    x: Tensor, topk_weights: Tensor | None, handle: EPBufferHandle
) -> tuple[Tensor, Tensor | None]:
    """Returns what travels back, x and its weights: with do_expand one row for each token, or as
    many as dispatch made."""
    if not handle.do_expand:
        return x, topk_weights
    if handle.returns.plan.layout == "rank_major":
        weights = None if topk_weights is None else handle.weights_of_rows(topk_weights)
        return handle.sum_of_rows(x), weights
    weights = None if topk_weights is None else handle.fitted(topk_weights).view(-1, 1)
    return handle.fitted(x), weights


def _agree(plan: Plan) -> None:
    """Collective. Ranks that make another call by the plan instead, such as a combine of rows of
    its own width, raise, as this one does: calls have come out of step. Nothing in a capture."""
    exchange = plan.exchange
    on_gpu = exchange.device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return
    nothing = torch.zeros((plan.num_tokens, 16), dtype=torch.uint8, device=exchange.device)
    exchange.dispatch(plan, nothing)
    if on_gpu:
        torch.cuda.current_stream(exchange.device).synchronize()
        plan.calls.check()


@without_gradients
def _finish(
    returns: Returns, rows: Tensor, weights: Tensor | None, biases: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """On the current stream: the sums of what has returned."""
    if rows.is_cuda:
        known_to((rows, weights), torch.cuda.current_stream(rows.device))
    return returns.sums(rows, biases), None if weights is None else returns.weights(weights)


def _handed_on(result: tuple) -> tuple:
    """Returns the result of dispatch, made known to the current stream."""
    tensors = [one for one in (*parts_of(result[0]), *result[1:3]) if one is not None]
    if tensors[0].is_cuda:
        known_to(tensors, torch.cuda.current_stream(tensors[0].device))
    return result


def _deferred(event: EventOverlap, finish: Callable[[], Any]) -> EventOverlap:
    """event, whose wait returns finish()."""
    event.register_hook_after_wait(finish)
    return event
