# SPDX-License-Identifier: Apache-2.0
"""`ElasticBuffer.dispatch` and `combine`: payload.py sends the rows, handle.py has the handle."""

from typing import Any

import torch
from torch import Tensor

from weft import Plan
from weft.streams import CommStream

from ..checks import check, check_handle, check_integers, refused_by_all
from ..events import EventOverlap, event_of
from ..payload import (
    numbers,
    received_numbers,
    received_topk,
    round_up,
    row_major,
    send_beside,
)
from ..runtime import ExchangePool
from .handle import EPHandle

Rows = Tensor | tuple[Tensor, Tensor]
_TMA_BYTES = 16  # what a column of scaling factors is aligned to


class ElasticCalls:
    """The attributes are set by `ElasticBuffer`."""

    num_ranks: int
    num_scaleup_ranks: int
    rank_idx: int
    num_max_tokens_per_rank: int
    num_allocated_qps: int
    allow_multiple_reduction: bool
    runtime: ExchangePool | None
    _comm: CommStream

    def pool(self, verb: str) -> ExchangePool:
        """The exchanges, while the buffer has them."""
        check(self.runtime is not None, f"{verb}: the buffer was destroyed (make a new one)")
        return self.runtime

    def _check_call(
        self, verb: str, num_qps: int, previous_event: Any, allocate_on_comm_stream: bool
    ) -> None:
        self.pool(verb)
        check(
            num_qps <= self.num_allocated_qps,
            f"{verb}: num_qps = {num_qps} (at most {self.num_allocated_qps} are allocated)",
        )
        check(
            previous_event is None or allocate_on_comm_stream,
            f"{verb}: previous_event without allocate_on_comm_stream (expected both)",
        )

    @torch.no_grad()
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
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Collective. Tokens to their experts.

        x [T, H] bf16, fp16 or fp32, or (FP8 [T, H], scaling factors [T, S] of any strides).
        topk_idx int64 or int32 [T, K], -1 = no expert; topk_weights fp32 [T, K] or None;
        num_experts. T may differ between ranks, up to num_max_tokens_per_rank, which does not.
        Or the handle of an earlier call, whose choices are used again, with or without weights.
        cumulative_local_expert_recv_stats int32 [El]: the choices of each local expert are added,
        except with a handle.
        do_expand: one row for each choice, by local expert (each rounded up to expert_alignment
        rows, padding zero), then source rank and token; else one row for each token on each rank,
        by source rank, then token.
        do_cpu_sync: None and True: as many rows as arrive, which the host waits for. False: as many
        as could arrive, without a wait; what is past those that did is undefined.
        num_sms: SMs to use, 0: by Weft's measured table.
        previous_event: when to begin, instead of after the current stream's work; needs
        allocate_on_comm_stream. async_with_compute_stream: the current stream does not wait.
        use_tma_aligned_col_major_sf: received scaling factors have adjacent columns, each beginning
        at a multiple of 16 bytes.

        Returns (rows, topk_idx, weights, handle, event): rows like x; topk_idx int64 [N, K], local
        experts or -1, None with do_expand; weights fp32 [N, K], 0 where topk_idx is -1, or [N] with
        do_expand; None if not given. The handle is the given one, or new.
        Raises InvalidArgument (also an AssertionError).
        """
        del do_zero_padding  # padding always is
        self._check_call("dispatch", num_qps, previous_event, allocate_on_comm_stream)
        x, sf = x if isinstance(x, tuple) else (x, None)
        check(x.dim() == 2, f"dispatch: x has shape {list(x.shape)} (expected [tokens, hidden])")
        if handle is not None:
            check_handle("dispatch", handle, EPHandle)
            check(topk_idx is None, "dispatch: topk_idx beside a handle (which has its own)")
            check(not do_cpu_sync, "dispatch: do_cpu_sync with a handle (which needs none)")
            for name, given in (
                ("num_experts", num_experts),
                ("expert_alignment", expert_alignment),
                ("num_max_tokens_per_rank", num_max_tokens_per_rank),
                ("do_expand", do_expand or None),
            ):
                known = getattr(handle, name)
                check(
                    given is None or given == known,
                    f"dispatch: {name} = {given} with a handle of {known} "
                    "(expected the same, or None)",
                )
        with self._comm.call(
            x.device,
            [x, sf, topk_idx, topk_weights, cumulative_local_expert_recv_stats],
            previous_event=previous_event,
            async_finish=async_with_compute_stream,
        ) as call:
            _wait_for(previous_event_before_epilogue, x)
            sf = None if sf is None else row_major(sf)
            if handle is None:
                check(topk_idx is not None, "dispatch: topk_idx is None (expected it or a handle)")
                check(num_experts is not None, "dispatch: num_experts is None (required)")
                most = num_max_tokens_per_rank
                handle, rows, weights, sf = self._first(
                    (x, topk_weights, sf),
                    topk_idx,
                    num_experts,
                    do_expand=do_expand,
                    expert_alignment=1 if expert_alignment is None else expert_alignment,
                    num_max_tokens_per_rank=self.num_max_tokens_per_rank if most is None else most,
                    num_sms=num_sms,
                    has_cpu_sync=do_cpu_sync is None or do_cpu_sync,
                )
                if do_handle_copy:
                    handle.topk_idx = topk_idx.clone()
                call.returns(handle.sources, handle.ids, handle.topk_idx)
                if cumulative_local_expert_recv_stats is not None:
                    cumulative_local_expert_recv_stats.add_(handle.plan.rows_per_expert)
            else:
                plan = handle.plan
                sms = _sms_of(x, num_sms or handle.num_sms)
                rows, weights, sf = plan.exchange.dispatch(plan, x, topk_weights, sf, num_sms=sms)
            recv_topk_idx = None if handle.do_expand else handle.ids.to(torch.int64)
            if weights is not None and handle.do_expand:
                weights = weights.view(-1)
            if sf is not None and use_tma_aligned_col_major_sf:
                sf = _column_major(sf)
            call.returns(rows, sf, recv_topk_idx, weights)
        recv_x = rows if sf is None else (rows, sf)
        return recv_x, recv_topk_idx, weights, handle, event_of(call)

    def _first(
        self,
        sent: tuple[Tensor, Tensor | None, Tensor | None],
        topk_idx: Tensor,
        num_experts: int,
        **settings: Any,
    ) -> tuple[EPHandle, Tensor, Tensor | None, Tensor | None]:
        """Collective. Plans and dispatches. sent: x, weights and scaling factors; they are returned
        as received, behind the handle. settings: those that the handle keeps.
        """
        x, weights, sf = sent
        do_expand, alignment = settings["do_expand"], settings["expert_alignment"]
        most, num_sms = settings["num_max_tokens_per_rank"], settings["num_sms"]
        check_integers("dispatch", topk_idx)
        exchange = self.pool("dispatch").get(
            hidden=x.size(1),
            num_experts=num_experts,
            device=x.device,
            max_tokens=max(most, 1),
            max_topk=topk_idx.size(1),
        )
        rows = None
        if not settings["has_cpu_sync"]:
            rows = self.num_ranks * most
            if do_expand:
                local = exchange.num_local_experts
                rows *= min(topk_idx.size(1), local)
                rows = round_up(rows + (alignment - 1) * local, alignment)
        options = {
            "layout": "expert_major" if do_expand else "rank_major",
            "pad_multiple": alignment if do_expand else 1,
            "row_budget": rows,
        }
        with refused_by_all(exchange, **options):
            check(
                x.size(0) <= most,
                f"dispatch: x has {x.size(0)} tokens (at most num_max_tokens_per_rank = {most})",
            )
        tokens = torch.arange(x.size(0), device=x.device) + self.rank_idx * most
        origin = numbers(torch.cat([tokens.unsqueeze(1), topk_idx], dim=1))
        columns = (origin,) if sf is None else (origin, sf)
        options["num_sms"] = _sms_of(x, num_sms)
        plan, out, (origin, *row_sf) = send_beside(
            exchange, topk_idx, x, weights, columns, **options
        )
        origin = received_numbers(plan, origin)
        handle = EPHandle(
            plan=plan,
            topk_idx=topk_idx,
            num_scaleup_ranks=self.num_scaleup_ranks,
            sources=origin[:, 0].contiguous(),
            ids=received_topk(plan, origin[:, 1:]),
            **settings,
        )
        return handle, out.rows, out.weights, row_sf[0] if row_sf else None

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Collective. Rows as `dispatch` returned them, summed into their tokens, unweighted.

        x [rows, H] bf16, fp16 or fp32; topk_weights fp32 like those of `dispatch`; bias: one or two
        [T, H], added in fp32 before the one rounding. A rank's rows of a token are summed and
        rounded first, unless the buffer was made without allow_multiple_reduction, or there is a
        bias: rows then travel as fp32, which takes twice the bytes of bf16.
        Streams and events as for `dispatch`.
        Returns (tokens [T, H], weights fp32 [T, K] or None, event): zeros for a token without rows
        (plus bias), and for a weight without a choice.
        Raises InvalidArgument (also an AssertionError).
        """
        self._check_call("combine", num_qps, previous_event, allocate_on_comm_stream)
        check_handle("combine", handle, EPHandle)
        plan = handle.plan
        biases = _biases_of(x, plan, bias)
        with self._comm.call(
            x.device,
            [x, topk_weights, *biases],
            previous_event=previous_event,
            async_finish=async_with_compute_stream,
        ) as call:
            _wait_for(previous_event_before_epilogue, x)
            row_weights = topk_weights
            if topk_weights is not None and handle.do_expand:
                row_weights = topk_weights.reshape(-1, 1)
            one_rounding = bool(biases) or (handle.do_expand and not self.allow_multiple_reduction)
            out, weights = plan.exchange.combine(
                plan,
                x.float() if one_rounding else x,
                row_weights,
                num_sms=_sms_of(x, num_sms or handle.num_sms),
            )
            for one in biases:
                out = out + one.float()
            combined = out.to(x.dtype)
            call.returns(combined, weights)
        return combined, weights, event_of(call)


def _column_major(sf: Tensor) -> Tensor:
    """A copy [N, S] with strides (1, N rounded up to 16 bytes)."""
    num_rows, num_columns = sf.shape
    step = round_up(num_rows, max(_TMA_BYTES // sf.element_size(), 1))
    made = sf.new_empty((num_columns, step)).t()[:num_rows]
    return made.copy_(sf)


def _biases_of(x: Tensor, plan: Plan, bias: Tensor | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    if bias is None:
        return []
    biases = [bias] if isinstance(bias, Tensor) else list(bias)
    check(len(biases) <= 2, f"combine: {len(biases)} biases (at most two)")
    biases = [one for one in biases if one is not None]
    for one in biases:
        check(
            one.shape == (plan.num_tokens, x.size(1)),
            f"combine: bias has shape {list(one.shape)} "
            f"(expected [{plan.num_tokens}, {x.size(1)}])",
        )
    return biases


def _sms_of(x: Tensor, num_sms: int) -> int:
    return num_sms if x.is_cuda else 0


def _wait_for(event: Any, x: Tensor) -> None:
    """Everything waits for it: moving rows has no later half that could wait by itself."""
    if event is not None and x.is_cuda:
        event.current_stream_wait()
