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

from weft import Group, Unsupported
from weft.streams import CommStream

from ..checks import check
from ..events import EventHandle
from ..layout import found_ranks_per_domain
from ..payload import round_up
from ..runtime import ExchangePool
from . import model
from .calls import ElasticCalls

# Members that `deep_ep` marks experimental, by the reason why Weft has none of them.
_EXPERIMENTAL = {
    "fetching entries of a remote table is not an exchange of tokens": (
        "engram_write engram_fetch get_engram_storage_size_hint"
    ),
    "sending between pipeline stages is torch.distributed's work": (
        "pp_set_config pp_send pp_recv get_pp_buffer_size_hint"
    ),
    "gathering and scattering are torch.distributed's work": (
        "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config "
        "agrs_get_inplace_tensor all_gather get_agrs_num_max_session_bytes "
        "get_agrs_buffer_size_hint"
    ),
}


def _refusing(name: str, why: str) -> staticmethod:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise Unsupported(f"{name}: experimental and not part of Weft ({why})", "unsupported")

    refuse.__name__ = name
    refuse.__doc__ = f"Raises Unsupported: {why}."
    return staticmethod(refuse)


class ElasticBuffer(ElasticCalls):
    """Moves tokens to the ranks of their experts and back, on a communication stream of its own.

    Collective. num_max_tokens_per_rank: the default of `dispatch`, the same on all ranks.
    num_bytes: None or an amount, rounded up to 2 MiB; memory grows as it is needed, so this is for
    callers to compare. num_gpu_timeout_secs: of every wait for another rank.
    `explicitly_destroy`: `destroy()` will be called.
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
            raise Unsupported(
                f"ElasticBuffer: num_cpu_bytes = {num_cpu_bytes} (storage on the host is for "
                "experimental members, which Weft has not)",
                "unsupported",
            )
        ranks = Group.of(group)
        self.group = group
        self.rank_idx: int = ranks.rank
        self.num_ranks: int = ranks.num_ranks
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
        self._num_sms: dict[tuple, int] = {}

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
        self.pool("barrier").group.all_gather(b"barrier")

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
        key = (num_experts, num_topk, rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs)
        if key not in self._num_sms:
            physical = self.get_physical_domain_size()
            self._num_sms[key] = model.theoretical_num_sms(
                num_experts,
                num_topk,
                model.Ranks(self.num_ranks, *self.get_logical_domain_size(), *physical),
                model.Rates(
                    rdma_gbs or model.rdma_gbs(),
                    nvlink_gbs or model.nvlink_gbs(),
                    sm_read_gbs,
                    sm_write_gbs,
                ),
                model.device_sms(),
                self.prefer_overlap_with_compute,
            )
        return self._num_sms[key]

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that `deep_ep` would use with num_sms."""
        return model.theoretical_num_qps(num_sms, self.allow_hybrid_mode, self.num_allocated_qps)


for _why, _names in _EXPERIMENTAL.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, _refusing(_name, _why))
