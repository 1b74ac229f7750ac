# SPDX-License-Identifier: Apache-2.0
"""`ElasticBuffer`: the interface of DeepEP V2, on Weft exchanges.

Same names, arguments and results. What differs:

* Rows always come in the order of the sources' ranks and tokens, as with `deterministic=True`.
* Padding rows are always zeros, as with `do_zero_padding=True`, and received weights are 0 where a
  choice is another rank's.
* num_sms 0 takes Weft's measured number, with a handle too. There are no queue pairs; arguments
  about them are checked and otherwise ignored.
* Any hidden size whose rows are a multiple of 16 bytes, bf16, fp16 or fp32.
Results carry no gradient. Members that `deep_ep` marks experimental and no MoE layer calls raise
Unsupported.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group
from weft.streams import CommStream

from ..checks import (
    INTEGERS,
    NotInWeft,
    check,
    check_experts,
    check_handle,
    check_optional,
    check_tensor,
)
from ..layout import found_ranks_per_domain
from ..payload import (
    Payload,
    Received,
    Rows,
    biases_of,
    bring_back,
    numbers,
    parts_of,
    received_numbers,
    received_topk,
    round_up,
)
from ..runtime import Call, ExchangePool, without_gradients
from ..utils.event import EventHandle, EventOverlap, event_of
from . import model
from .handle import EPHandle

_TMA_BYTES = 16  # what a column of scaling factors is aligned to


class ElasticBuffer:
    """Moves tokens to the ranks of their experts and back, on a communication stream of its own.

    Collective. num_max_tokens_per_rank: the default of `dispatch`, the same on all ranks.
    num_bytes: None or an amount, rounded up to 2 MiB; memory grows as it is needed, so this is for
    callers to compare. num_gpu_timeout_secs: of every wait for another rank.
    `explicitly_destroy`: `destroy()` will be called.
    Calls raise InvalidArgument (also an AssertionError).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        del sl_idx, num_cpu_timeout_secs  # the network's; a wait of the host ends with the GPU's
        if num_cpu_bytes > 0:
            raise NotInWeft(
                f"ElasticBuffer: num_cpu_bytes = {num_cpu_bytes} (storage on the host is for "
                "experimental members, which Weft has not)"
            )
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
        if num_bytes is None:
            sizes = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
            modes = (allow_hybrid_mode, allow_multiple_reduction)
            num_bytes = self.get_buffer_size_hint(group, *sizes, *modes)
        self.num_bytes: int = round_up(num_bytes, model.ALIGNMENT)
        self.nccl_comm_handle: Any = None  # there is no NCCL here
        self.runtime: ExchangePool | None = ExchangePool(ranks, float(num_gpu_timeout_secs))
        self._comm = CommStream()

    def destroy(self) -> None:
        """Lets go of the memory; the buffer refuses calls from then on.

        AssertionError unless the buffer was made with explicitly_destroy.
        """
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = None

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
        """Bytes, a multiple of 2 MiB, that grow with every size. num_topk 0 counts as 32."""
        del allow_hybrid_mode  # as much either way
        sizes = (group.size(), num_max_tokens_per_rank, hidden, num_topk)
        return model.buffer_bytes(*sizes, use_fp8_dispatch, allow_multiple_reduction)

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream, for `previous_event`."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that calls run on, of the current GPU. RuntimeError without a GPU."""
        return self._comm.of(torch.device("cuda", torch.cuda.current_device()))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Ranks that need the network to reach each other, and ranks of an NVLink domain."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Scale-out ranks and scale-up ranks; one and all without hybrid mode."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Collective. Work queued before, on any rank, is done before work queued after.

        The host waits, always: with_cpu_sync for the whole GPU, else for the stream.
        """
        del sequential
        if torch.cuda.is_initialized():
            if with_cpu_sync:
                torch.cuda.synchronize()
            elif use_comm_stream:
                self.get_comm_stream().synchronize()
            else:
                torch.cuda.current_stream().synchronize()
        self.pool().group.all_gather(b"barrier")

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs for dispatch and combine by a model of the traffic; experts chosen at random.

        Rates in GB/s, 0: found out. Calls take Weft's measured number unless given this one.
        AssertionError if num_scaleout_topk is not 0, or experts cannot be shared out equally.
        """
        check(
            num_scaleout_topk == 0,
            f"get_theoretical_num_sms: num_scaleout_topk = {num_scaleout_topk} (expected 0)",
        )
        check(
            num_experts % self.num_ranks == 0 and 1 <= num_topk <= num_experts,
            f"get_theoretical_num_sms: num_experts = {num_experts}, num_topk = {num_topk} "
            f"(expected a multiple of {self.num_ranks} ranks, and 1 to num_experts)",
        )
        ranks = (*self.get_logical_domain_size(), *self.get_physical_domain_size())
        links = (rdma_gbs or model.rdma_gbs(), nvlink_gbs or model.nvlink_gbs())
        return model.theoretical_num_sms(
            num_experts,
            num_topk,
            model.Ranks(self.num_ranks, *ranks),
            model.Rates(*links, sm_read_gbs, sm_write_gbs),
            model.device_sms(),
            self.prefer_overlap_with_compute,
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that `deep_ep` would use with num_sms."""
        return model.theoretical_num_qps(num_sms, self.allow_hybrid_mode, self.num_allocated_qps)

    def pool(self) -> ExchangePool:
        """The exchanges, while the buffer has them."""
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
        """
        del do_zero_padding  # padding always is
        stats = cumulative_local_expert_recv_stats
        streams = (previous_event, async_with_compute_stream)
        verb = "plan_and_dispatch" if handle is None else "dispatch"
        has_cpu_sync = do_cpu_sync is None or do_cpu_sync
        wants = {"layout": "rank_major", "row_budget": None if has_cpu_sync else 0}
        with Call("dispatch", self.runtime, verb, **wants) as call:
            self._check_call(num_qps, previous_event, allocate_on_comm_stream)
            if handle is not None:
                call.by(check_handle(handle, EPHandle).plan)
            payload = Payload(x, scales=None)
            if handle is not None:
                check(topk_idx is None, "topk_idx beside a handle (which has its own)")
                check(not do_cpu_sync, "do_cpu_sync with a handle (which needs none)")
                for name, given in (
                    ("num_experts", num_experts),
                    ("expert_alignment", expert_alignment),
                    ("num_max_tokens_per_rank", num_max_tokens_per_rank),
                    ("do_expand", do_expand or None),
                ):
                    known = getattr(handle, name)
                    check(
                        given is None or given == known,
                        f"{name} = {given} with a handle of {known} (expected the same, or None)",
                    )
            else:
                check(topk_idx is not None, "topk_idx is None (expected it or a handle)")
                check(num_experts is not None, "num_experts is None (required)")
            inputs = (*payload.tensors, topk_idx, topk_weights, stats)
            with self._comm.call(payload.device, inputs, *streams) as work:
                _wait_for(previous_event_before_epilogue, payload.device)
                if handle is None:
                    most = num_max_tokens_per_rank
                    most = self.num_max_tokens_per_rank if most is None else most
                    handle, out = self._first(
                        call,
                        payload,
                        (topk_idx, topk_weights, num_experts, stats),
                        do_expand=do_expand,
                        expert_alignment=1 if expert_alignment is None else expert_alignment,
                        num_max_tokens_per_rank=most,
                        num_sms=num_sms,
                        has_cpu_sync=has_cpu_sync,
                    )
                    if do_handle_copy:
                        handle.topk_idx = topk_idx.clone()
                    work.returns(handle.sources, handle.ids, handle.topk_idx)
                    if stats is not None:
                        stats.add_(handle.plan.rows_per_expert)
                else:
                    out = payload.send(call, None, topk_weights, num_sms=num_sms or handle.num_sms)
                recv_x, weights = out.x, out.weights
                recv_topk_idx = None if handle.do_expand else handle.ids.to(torch.int64)
                if weights is not None and handle.do_expand:
                    weights = weights.view(-1)
                if use_tma_aligned_col_major_sf and isinstance(recv_x, tuple):
                    recv_x = (recv_x[0], *map(_column_major, recv_x[1:]))
                work.returns(*parts_of(recv_x), recv_topk_idx, weights)
        return recv_x, recv_topk_idx, weights, handle, event_of(work)

    def _first(
        self, call: Call, payload: Payload, routing: tuple, **settings: Any
    ) -> tuple[EPHandle, Received]:
        """Collective. Plans and dispatches. routing: topk_idx, topk_weights, num_experts, stats.
        settings: those that the handle keeps."""
        topk_idx, topk_weights, num_experts, stats = routing
        do_expand, alignment = settings["do_expand"], settings["expert_alignment"]
        most, num_tokens = settings["num_max_tokens_per_rank"], payload.num_tokens
        check_tensor("topk_idx", topk_idx, INTEGERS, [num_tokens, "K"])
        check_optional("topk_weights", topk_weights, torch.float32, topk_idx.shape)
        check_experts(num_experts, self.num_ranks)
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
                rows *= min(topk_idx.size(1), local)
                rows = round_up(rows + (alignment - 1) * local, alignment)
        call.plans(
            (payload.hidden, num_experts, payload.device),
            max(most, 1),
            topk_idx.size(1),
            layout="expert_major" if do_expand else "rank_major",
            pad_multiple=alignment if do_expand else 1,
            row_budget=rows,
        )
        tokens = torch.arange(num_tokens, device=payload.device) + self.rank_idx * most
        origin = numbers(torch.cat([tokens.unsqueeze(1), topk_idx], dim=1))
        out = payload.send(call, topk_idx, topk_weights, (origin,), settings["num_sms"])
        origin = received_numbers(out.plan, out.beside[0])
        handle = EPHandle(
            plan=out.plan,
            topk_idx=topk_idx,
            num_scaleup_ranks=self.num_scaleup_ranks,
            sources=origin[:, 0].contiguous(),
            ids=received_topk(out.plan, origin[:, 1:]),
            **settings,
        )
        return handle, out

    @without_gradients
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
        [T, H], added in fp32 before the last rounding. A rank's rows of a token are summed and
        rounded first, unless the buffer was made without allow_multiple_reduction. Then, and with a
        bias, rows travel as fp32, which takes twice the bytes of bf16.
        Streams and events as for `dispatch`.
        Returns (tokens [T, H], weights fp32 [T, K] or None, event): zeros for a token without rows
        (plus bias), and for a weight without a choice.
        """
        streams = (previous_event, async_with_compute_stream)
        with Call("combine", self.runtime, "combine") as call:
            self._check_call(num_qps, previous_event, allocate_on_comm_stream)
            check_handle(handle, EPHandle)
            plan = call.by(handle.plan)
            check_tensor("x", x, None, ["rows", "H"])
            biases = biases_of(bias, None, [plan.num_tokens, plan.exchange.hidden])
            with self._comm.call(x.device, (x, topk_weights, *biases), *streams) as work:
                _wait_for(previous_event_before_epilogue, x.device)
                if topk_weights is not None and handle.do_expand:
                    topk_weights = topk_weights.reshape(-1, 1)
                is_wide = handle.do_expand and not self.allow_multiple_reduction
                num_sms, rows = num_sms or handle.num_sms, x
                if biases and handle.do_expand and not is_wide:
                    rows = _rank_sums(x, handle.sources, plan.topk)
                out, weights = bring_back(call, rows, topk_weights, biases, is_wide, num_sms)
                combined = (out.to(x.dtype), weights)
                work.returns(*combined)
        return *combined, event_of(work)


def _column_major(sf: Tensor) -> Tensor:
    """A copy [N, S] with strides (1, N rounded up to 16 bytes)."""
    num_rows, num_columns = sf.shape
    step = round_up(num_rows, max(_TMA_BYTES // sf.element_size(), 1))
    made = sf.new_empty((num_columns, step)).t()[:num_rows]
    return made.copy_(sf)


def _rank_sums(x: Tensor, sources: Tensor, most: int) -> Tensor:
    """fp32 like x [rows, H]: the first row of each token has the sum of the token's rows in their
    order, rounded to x's dtype; its other rows are zero. sources [rows]: the token of each row;
    most: rows that a token may have."""
    order = sources.argsort(stable=True)
    token, rows = sources[order], x[order].float()
    sums = rows.clone()
    for step in range(1, min(most, len(rows))):
        is_same = (token[step:] == token[:-step]).unsqueeze(1)
        sums[:-step] += torch.where(is_same, rows[step:], 0.0)
    is_first = torch.ones_like(token, dtype=torch.bool)
    is_first[1:] = token[1:] != token[:-1]
    sums = torch.where(is_first.unsqueeze(1), sums.to(x.dtype).float(), 0.0)
    return torch.empty_like(sums).index_copy_(0, order, sums)


def _wait_for(event: Any, device: torch.device) -> None:
    """Everything waits for it: moving rows has no later half that could wait by itself."""
    if event is not None and device.type == "cuda":
        event.current_stream_wait()


def _refusing(name: str, what: str) -> staticmethod:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises Unsupported, whatever it is called with."""
        why = f"{what} is not an exchange of tokens"
        raise NotInWeft(f"{name}: experimental and not part of Weft ({why})")

    return staticmethod(refuse)


# Members that `deep_ep` marks experimental and that Weft has not, by what they are for.
for _what, _names in {
    "fetching entries of a remote table": (
        "engram_write engram_fetch get_engram_storage_size_hint"
    ),
    "sending between pipeline stages": "pp_set_config pp_send pp_recv get_pp_buffer_size_hint",
    "gathering and scattering": (
        "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config all_gather "
        "agrs_get_inplace_tensor get_agrs_num_max_session_bytes get_agrs_buffer_size_hint"
    ),
}.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, _refusing(_name, _what))
