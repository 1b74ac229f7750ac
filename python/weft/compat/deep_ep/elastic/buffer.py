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

from ..checks import (
    NotInWeft,
    check_handle,
    check_tensor,
)
from ..payload import (
    Payload,
    Rows,
    biases_of,
    bring_back,
    parts_of,
    round_up,
)
from ..runtime import Call, without_gradients
from ..utils.event import EventOverlap, event_of
from . import model
from .base import BufferBase
from .handle import EPHandle


class ElasticBuffer(BufferBase):
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
        if num_bytes is None:
            sizes = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
            num_bytes = self.get_buffer_size_hint(group, *sizes, *modes)
        self.num_bytes: int = round_up(num_bytes, model.ALIGNMENT)

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
        """Returns bytes, a multiple of 2 MiB, growing with every size. num_topk 0: 32."""
        del allow_hybrid_mode  # as much either way
        sizes = (group.size(), num_max_tokens_per_rank, hidden, num_topk)
        return model.buffer_bytes(*sizes, use_fp8_dispatch, allow_multiple_reduction)

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Collective. Ends all work queued before, on any rank, before later work.

        The host waits, always: with_cpu_sync for the whole GPU, else for the stream.
        """
        del sequential
        self._barrier(use_comm_stream, with_cpu_sync)

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
        """Returns SMs for dispatch and combine by a model of traffic to random experts.

        Rates in GB/s, 0: detected. Calls take Weft's measured number unless given this one.
        AssertionError if num_scaleout_topk is not 0, or experts cannot be shared out equally.
        """
        ranks = self._ranks_of_model(num_experts, num_topk, num_scaleout_topk)
        links = (rdma_gbs or model.rdma_gbs(), nvlink_gbs or model.nvlink_gbs())
        return model.theoretical_num_sms(
            num_experts,
            num_topk,
            ranks,
            model.Rates(*links, sm_read_gbs, sm_write_gbs),
            model.device_sms(),
            self.prefer_overlap_with_compute,
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
        """Collective. Sends tokens to experts.

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
            given = {
                "expert_alignment": expert_alignment,
                "num_max_tokens_per_rank": num_max_tokens_per_rank,
                "do_expand": do_expand or None,
            }
            self._check_choices(handle, topk_idx, num_experts, do_cpu_sync, given)
            inputs = (*payload.tensors, topk_idx, topk_weights, stats)
            with self._comm.call(payload.device, inputs, *streams) as work:
                _wait_for(previous_event_before_epilogue, payload.device)
                most = num_max_tokens_per_rank
                is_first = handle is None
                recv_x, recv_topk_idx, weights, handle = self._move(
                    call,
                    payload,
                    handle,
                    (topk_idx, topk_weights, num_experts, stats),
                    use_tma_aligned_col_major_sf,
                    do_expand=do_expand,
                    expert_alignment=1 if expert_alignment is None else expert_alignment,
                    num_max_tokens_per_rank=self.num_max_tokens_per_rank if most is None else most,
                    num_sms=num_sms,
                    has_cpu_sync=has_cpu_sync,
                )
                if is_first and do_handle_copy:
                    handle.topk_idx = topk_idx.clone()
                work.returns(handle.sources, handle.ids, handle.topk_idx)
                work.returns(*parts_of(recv_x), recv_topk_idx, weights)
        return recv_x, recv_topk_idx, weights, handle, event_of(work)

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
        """Collective. Sums rows, in `dispatch`'s order, unweighted into their tokens.

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


def _rank_sums(x: Tensor, sources: Tensor, most: int) -> Tensor:
    """Returns fp32 like x [rows, H]: a token's first row has the sum of its rows in order, rounded
    to x's dtype; the others are zero. sources [rows]: the token of each row; most: the most rows of
    a token."""
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
    """Waits for `event` with the whole call: there is no epilogue that could wait alone."""
    if event is not None and device.type == "cuda":
        event.current_stream_wait()


def _refusing(name: str, what: str) -> staticmethod:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises Unsupported, whatever it is called with."""
        why = f"{what} is not an exchange of tokens"
        raise NotInWeft(f"{name}: experimental and not part of Weft ({why})")

    return staticmethod(refuse)


# Members that `deep_ep` marks experimental and Weft lacks, by purpose.
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
