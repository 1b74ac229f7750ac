# SPDX-License-Identifier: Apache-2.0
"""Common parts of `ElasticBuffer` and `EPBuffer`: the life of a buffer, what it says of its ranks,
and how rows reach their experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group
from weft.streams import CommStream

from ..checks import (
    INTEGERS,
    check,
    check_experts,
    check_least,
    check_optional,
    check_tensor,
)
from ..layout import found_ranks_per_domain
from ..payload import Payload, Received, Rows, numbers, received_numbers, received_topk, round_up
from ..runtime import Call, ExchangePool
from ..utils.event import EventHandle
from . import model
from .handle import EPHandle, most_expanded

_TMA_BYTES = 16  # alignment of a column of scaling factors


class BufferBase:
    """The ranks of a group, their exchanges and a communication stream.

    A subclass sets num_bytes, and `handle_class`, which remembers a dispatch.
    """

    handle_class = EPHandle
    num_bytes: int

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        deterministic: bool,
        allow_hybrid_mode: bool,
        allow_multiple_reduction: bool,
        prefer_overlap_with_compute: bool,
        num_allocated_qps: int,
        num_gpu_timeout_secs: int,
        explicitly_destroy: bool,
    ) -> None:
        """Collective at the first call for a group."""
        ranks = Group.of(group)
        self.group = group
        self.rank_idx, self.num_ranks = ranks.rank, ranks.num_ranks
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_nvlink_ranks: int = found_ranks_per_domain(ranks)
        self.num_rdma_ranks: int = self.num_ranks // self.num_nvlink_ranks
        self.num_scaleup_ranks: int = self.num_nvlink_ranks if allow_hybrid_mode else self.num_ranks
        self.num_scaleout_ranks: int = self.num_ranks // self.num_scaleup_ranks
        self.scaleup_rank_idx: int = self.rank_idx % self.num_scaleup_ranks
        self.scaleout_rank_idx: int = self.rank_idx // self.num_scaleup_ranks
        self.num_allocated_qps: int = num_allocated_qps or model.allocated_qps(allow_hybrid_mode)
        self.nccl_comm_handle: Any = None  # there is no NCCL here
        self.runtime: ExchangePool | None = ExchangePool(ranks, num_gpu_timeout_secs)
        self._comm = CommStream()

    def destroy(self) -> None:
        """Frees the memory; the buffer refuses later calls.

        AssertionError unless the buffer was made with explicitly_destroy.
        """
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = None

    @staticmethod
    def capture() -> EventHandle:
        """Records the current stream, for `previous_event`."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the calls' stream on the current GPU. RuntimeError without a GPU."""
        return self._comm.of(torch.device("cuda", torch.cuda.current_device()))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns ranks that need the network to each other, and ranks of an NVLink domain."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns scale-out and scale-up ranks; (1, all) without hybrid mode."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def _barrier(self, wait_comm_stream: bool, with_cpu_sync: bool) -> None:
        """Collective. Ends all work queued before, on any rank, before later work.

        The host waits, always: with_cpu_sync for the whole GPU, else for the stream.
        """
        if torch.cuda.is_initialized():
            if with_cpu_sync:
                torch.cuda.synchronize()
            elif wait_comm_stream:
                self.get_comm_stream().synchronize()
            else:
                torch.cuda.current_stream().synchronize()
        self.pool().group.all_gather(b"barrier")

    def _ranks_of_model(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int
    ) -> model.Ranks:
        """Checks arguments of `get_theoretical_num_sms`; returns its ranks."""
        name = "get_theoretical_num_sms"
        check(
            num_scaleout_topk == 0, f"{name}: num_scaleout_topk = {num_scaleout_topk} (expected 0)"
        )
        check(
            num_experts % self.num_ranks == 0 and 1 <= num_topk <= num_experts,
            f"{name}: num_experts = {num_experts}, num_topk = {num_topk} "
            f"(expected a multiple of {self.num_ranks} ranks, and 1 to num_experts)",
        )
        ranks = (*self.get_logical_domain_size(), *self.get_physical_domain_size())
        return model.Ranks(self.num_ranks, *ranks)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns `deep_ep`'s queue pairs for num_sms."""
        return model.theoretical_num_qps(num_sms, self.allow_hybrid_mode, self.num_allocated_qps)

    def pool(self) -> ExchangePool:
        """Returns the exchanges of a live buffer."""
        check(self.runtime is not None, "the buffer was destroyed (make a new one)")
        return self.runtime

    def _check_call(self, num_qps: int, previous_event: Any, allocate_on_comm_stream: bool) -> None:
        self.pool()
        most = self.num_allocated_qps
        check(num_qps <= most, f"num_qps = {num_qps} (at most {most} are allocated)")
        check(
            previous_event is None or allocate_on_comm_stream,
            "previous_event without allocate_on_comm_stream (expected both)",
        )

    def _check_choices(
        self,
        handle: EPHandle | None,
        topk_idx: Tensor | None,
        num_experts: int | None,
        do_cpu_sync: bool | None,
        given: dict[str, Any],
    ) -> None:
        """Checks that a dispatch has choices, or a handle that `given` does not contradict: by
        attribute of the handle, None: not said."""
        if handle is None:
            check(topk_idx is not None, "topk_idx is None (expected it or a handle)")
            check(num_experts is not None, "num_experts is None (required)")
            return
        check(topk_idx is None, "topk_idx beside a handle (which has its own)")
        check(not do_cpu_sync, "do_cpu_sync: Cannot do CPU sync with cached handle")
        for name, value in {"num_experts": num_experts, **given}.items():
            known = getattr(handle, name)
            check(
                value is None or value == known,
                f"{name} = {value} with a handle of {known} (expected the same, or None)",
            )

    def _move(
        self,
        call: Call,
        payload: Payload,
        handle: EPHandle | None,
        routing: tuple,
        is_by_column: bool,
        **settings: Any,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle]:
        """Collective. Dispatches; returns rows, choices, weights and the handle (None: new).
        routing, settings: as for `_first`. is_by_column: scaling factors lie column-major."""
        _, topk_weights, _, stats = routing
        if handle is None:
            handle, out = self._first(call, payload, routing, **settings)
            if stats is not None:
                stats.add_(handle.plan.rows_per_expert)
        else:
            num_sms = settings["num_sms"] or handle.num_sms
            out = payload.send(call, None, topk_weights, num_sms=num_sms)
        recv_x, weights = out.x, out.weights
        recv_topk_idx = None if handle.do_expand else handle.ids.to(torch.int64)
        if weights is not None and handle.do_expand:
            weights = weights.view(-1)
        if is_by_column and isinstance(recv_x, tuple):
            recv_x = (recv_x[0], *map(_column_major, recv_x[1:]))
        return recv_x, recv_topk_idx, weights, handle

    def _places_per_token(self, topk: int, do_expand: bool) -> int:
        """Returns how often a call's largest plan lists a token, alike on all ranks."""
        del topk, do_expand
        return 1

    def _first(
        self, call: Call, payload: Payload, routing: tuple, **settings: Any
    ) -> tuple[EPHandle, Received]:
        """Collective. Plans and dispatches. routing: topk_idx, topk_weights, num_experts, stats.
        settings: kept in the handle."""
        topk_idx, topk_weights, num_experts, stats = routing
        do_expand, alignment = settings["do_expand"], settings["expert_alignment"]
        most, num_tokens = settings["num_max_tokens_per_rank"], payload.num_tokens
        check_tensor("topk_idx", topk_idx, INTEGERS, [num_tokens, "K"])
        check_optional("topk_weights", topk_weights, torch.float32, topk_idx.shape)
        check_experts(num_experts, self.num_ranks)
        check_least("expert_alignment", alignment)
        local = [num_experts // self.num_ranks]
        check_optional("cumulative_local_expert_recv_stats", stats, None, local)
        check(
            num_tokens <= most,
            f"x has {num_tokens} tokens (at most num_max_tokens_per_rank = {most})",
        )
        rows = None
        if not settings["has_cpu_sync"]:
            rows = self.num_ranks * most
            if do_expand:
                local = num_experts // self.num_ranks
                rows = most_expanded(rows, topk_idx.size(1), local, alignment)
        call.plans(
            (payload.hidden, num_experts, payload.device),
            max(most, 1) * self._places_per_token(topk_idx.size(1), do_expand),
            topk_idx.size(1),
            most,
            layout="expert_major" if do_expand else "rank_major",
            pad_multiple=alignment if do_expand else 1,
            row_budget=rows,
        )
        tokens = torch.arange(num_tokens, device=payload.device) + self.rank_idx * most
        origin = numbers(torch.cat([tokens.unsqueeze(1), topk_idx], dim=1))
        out = payload.send(call, topk_idx, topk_weights, (origin,), settings["num_sms"])
        origin = received_numbers(out.plan, out.beside[0])
        handle = self.handle_class(
            plan=out.plan,
            topk_idx=topk_idx,
            num_scaleup_ranks=self.num_scaleup_ranks,
            sources=origin[:, 0].contiguous(),
            ids=received_topk(out.plan, origin[:, 1:]),
            **settings,
        )
        return handle, out


def _column_major(sf: Tensor) -> Tensor:
    """Copies sf [N, S] to strides (1, N rounded up to 16 bytes)."""
    num_rows, num_columns = sf.shape
    step = round_up(num_rows, max(_TMA_BYTES // sf.element_size(), 1))
    made = sf.new_empty((num_columns, step)).t()[:num_rows]
    return made.copy_(sf)
