# SPDX-License-Identifier: Apache-2.0
"""`ElasticBuffer.dispatch`."""

from __future__ import annotations

from typing import Any

import torch

from weft import Exchange, Plan

from .checks import BadCall, check
from .elastic_base import ElasticBase, sms_of, wait_for
from .elastic_handle import EPHandle, handle_of
from .elastic_model import round_up
from .events import EventOverlap, event_of
from .exchange_pool import refuse
from .received import (
    numbers,
    pack_columns,
    received_numbers,
    received_topk,
    row_major,
    unpack_columns,
)

Tensor = torch.Tensor
Rows = Tensor | tuple[Tensor, Tensor]
_TMA_BYTES = 16  # what a column of scaling factors is aligned to


class ElasticDispatch(ElasticBase):
    """Tokens to their experts."""

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
        self.check_call("dispatch", num_qps, previous_event, allocate_on_comm_stream)
        x, sf = x if isinstance(x, tuple) else (x, None)
        check(x.dim() == 2, f"dispatch: x has shape {list(x.shape)} (expected [tokens, hidden])")
        if handle is not None:
            handle_of("dispatch", handle)
            check(topk_idx is None, "dispatch: topk_idx beside a handle (which has its own)")
            check(not do_cpu_sync, "dispatch: do_cpu_sync with a handle (which needs none)")
            _check_same("num_experts", num_experts, handle.num_experts)
            _check_same("expert_alignment", expert_alignment, handle.expert_alignment)
            _check_same(
                "num_max_tokens_per_rank", num_max_tokens_per_rank, handle.num_max_tokens_per_rank
            )
            _check_same("do_expand", do_expand or None, handle.do_expand)
        with self._comm.call(
            x.device,
            [x, sf, topk_idx, topk_weights, cumulative_local_expert_recv_stats],
            previous_event=previous_event,
            async_finish=async_with_compute_stream,
        ) as call:
            wait_for(previous_event_before_epilogue, x)
            sf = None if sf is None else row_major(sf)
            if handle is None:
                most = self.num_max_tokens_per_rank
                most = most if num_max_tokens_per_rank is None else num_max_tokens_per_rank
                alignment = 1 if expert_alignment is None else expert_alignment
                has_cpu_sync = do_cpu_sync is None or do_cpu_sync
                topk_idx, num_experts = _required(topk_idx, num_experts)
                exchange = self._exchange(x, topk_idx, num_experts, most)
                options = self._options(
                    exchange, topk_idx, most, alignment, has_cpu_sync, do_expand
                )
                plan, rows, weights, sf, sources, ids = self._send(
                    exchange, x, sf, topk_idx, topk_weights, most, num_sms=num_sms, **options
                )
                handle = EPHandle(
                    plan,
                    do_expand=do_expand,
                    expert_alignment=alignment,
                    num_max_tokens_per_rank=most,
                    num_scaleup_ranks=self.num_scaleup_ranks,
                    num_sms=num_sms,
                    topk_idx=topk_idx.clone() if do_handle_copy else topk_idx,
                    sources=sources,
                    ids=ids,
                    has_cpu_sync=has_cpu_sync,
                )
                call.returns(sources, ids, handle.topk_idx)
                if cumulative_local_expert_recv_stats is not None:
                    cumulative_local_expert_recv_stats.add_(plan.rows_per_expert)
            else:
                plan = handle.plan
                sms = sms_of(x, num_sms or handle.num_sms)
                rows, weights, sf = plan.exchange.dispatch(plan, x, topk_weights, sf, num_sms=sms)
            recv_topk_idx = None if handle.do_expand else handle.received_ids()
            if weights is not None and handle.do_expand:
                weights = weights.view(-1)
            if sf is not None and use_tma_aligned_col_major_sf:
                sf = _column_major(sf)
            call.returns(rows, sf, recv_topk_idx, weights)
        recv_x = rows if sf is None else (rows, sf)
        return recv_x, recv_topk_idx, weights, handle, event_of(call)

    def _exchange(self, x: Tensor, topk_idx: Tensor, num_experts: int, most: int) -> Exchange:
        check(
            topk_idx.dim() == 2 and topk_idx.dtype in (torch.int64, torch.int32),
            f"dispatch: topk_idx is {topk_idx.dtype} {list(topk_idx.shape)} "
            "(expected int64 or int32 [tokens, k])",
        )
        exchange = self.pool("dispatch").get(
            hidden=x.size(1),
            num_experts=num_experts,
            device=x.device,
            max_tokens=max(most, 1),
            max_topk=topk_idx.size(1),
        )
        if x.size(0) > most:
            refuse(
                exchange,
                f"dispatch: x has {x.size(0)} tokens (at most num_max_tokens_per_rank = {most})",
            )
        return exchange

    def _options(
        self,
        exchange: Exchange,
        topk_idx: Tensor,
        most: int,
        alignment: int,
        has_cpu_sync: bool,
        do_expand: bool,
    ) -> dict[str, Any]:
        rows = None
        if not has_cpu_sync:
            rows = self.num_ranks * most
            if do_expand:
                local = exchange.num_local_experts
                rows *= min(topk_idx.size(1), local)
                rows = round_up(rows + (alignment - 1) * local, alignment)
        return {
            "layout": "expert_major" if do_expand else "rank_major",
            "pad_multiple": alignment if do_expand else 1,
            "row_budget": rows,
        }

    def _send(
        self,
        exchange: Exchange,
        x: Tensor,
        sf: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        most: int,
        *,
        num_sms: int,
        **options: Any,
    ) -> tuple[Plan, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """Plan, rows, weights and scaling factors, and each row's token number and local experts.
        options: of the plan."""
        tokens = torch.arange(x.size(0), device=x.device) + self.rank_idx * most
        origin = numbers(torch.cat([tokens.unsqueeze(1), topk_idx], dim=1))
        parts = [origin] if sf is None else [origin, sf]
        plan, out = exchange.plan_and_dispatch(
            topk_idx, x, topk_weights, pack_columns(*parts), num_sms=sms_of(x, num_sms), **options
        )
        assert out.scales is not None
        origin, *row_sf = unpack_columns(out.scales, *parts)
        origin = received_numbers(plan, origin)
        ids = received_topk(plan, origin[:, 1:])
        sf = row_sf[0] if row_sf else None
        return plan, out.rows, out.weights, sf, origin[:, 0].contiguous(), ids


def _required(topk_idx: Tensor | None, num_experts: int | None) -> tuple[Tensor, int]:
    if topk_idx is None:
        raise BadCall("dispatch: topk_idx is None (expected it or a handle)")
    if num_experts is None:
        raise BadCall("dispatch: num_experts is None (required)")
    return topk_idx, num_experts


def _check_same(name: str, given: Any, known: Any) -> None:
    check(
        given is None or given == known,
        f"dispatch: {name} = {given} with a handle of {known} (expected the same, or None)",
    )


def _column_major(sf: Tensor) -> Tensor:
    """A copy [N, S] with strides (1, N rounded up to 16 bytes)."""
    num_rows, num_columns = sf.shape
    step = round_up(num_rows, max(_TMA_BYTES // sf.element_size(), 1))
    made = sf.new_empty((num_columns, step)).t()[:num_rows]
    return made.copy_(sf)
