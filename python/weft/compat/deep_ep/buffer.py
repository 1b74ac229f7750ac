# SPDX-License-Identifier: Apache-2.0
"""`Buffer`: what Megatron-LM, NeMo Automodel, vLLM and SGLang call to exchange tokens."""

from typing import Any

import torch
import torch.distributed as dist

from weft import Group
from weft.compat import environment

from . import config as configs
from .checks import check, check_even
from .config import Config
from .events import EventHandle, EventOverlap
from .low_latency import LowLatencyMode, RankMask
from .normal import NormalMode
from .runtime import TIMEOUT, MpiGroup, Runtime

_ALIGNMENT = 128  # bytes
_QP_DEPTH = 1024  # what callers read if nothing else was set


class Buffer(NormalMode, LowLatencyMode):
    """One rank's end of the exchange within a group; all ranks make the same calls in order.

    Works with CUDA and with CPU tensors, any number of ranks and any number of tokens on each, any
    hidden size whose rows are a multiple of 16 bytes. Errors of arguments are AssertionError,
    ValueError and RuntimeError in one (`weft.InvalidArgument`); a rank that does not come raises
    `weft.TimeoutError` or `weft.PeerError` after 100 s at most.
    """

    num_sms = 20  # GPU multiprocessors of a call whose config is None
    _DISPATCH, _COMBINE = configs.DISPATCH, configs.COMBINE  # by the number of ranks

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        *,
        allow_nvlink_for_normal_mode: bool = True,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """Collective. group: of torch.distributed, any backend; or comm: of mpi4py.

        Sizes in bytes, queue pairs, NVLink and fabric settings are accepted and have no effect:
        memory is taken when the first call shows what is needed, and links are found out. Memory
        goes with `destroy` if explicitly_destroy, else (or if that is forgotten) with this object.
        From allow_mnnvl on arguments go by keyword, as their positions differ between versions of
        `deep_ep`. ValueError without group and comm.
        """
        del num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl
        del allow_nvlink_for_normal_mode, use_fabric
        if group is None and comm is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            check(
                size >= 0 and size % _ALIGNMENT == 0,
                f"Buffer: {name} = {size} (expected a multiple of {_ALIGNMENT})",
            )
        ranks = Group.of(group) if group is not None else MpiGroup(comm)
        self.rank: int = ranks.rank
        self.group: Any = group if group is not None else comm
        self.group_size: int = ranks.num_ranks
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.nvshmem_qp_depth: int = environment.number("NVSHMEM_QP_DEPTH", default=_QP_DEPTH)
        self.runtime: Runtime | None = Runtime(ranks, self._timeout())
        self._mask = RankMask(self.group_size)

    def destroy(self) -> None:
        """Waits for this rank's GPU and gives the memory back; the buffer is of no use then.

        AssertionError without explicitly_destroy. Handles that are alive keep what they need.
        """
        runtime = self._runtime("destroy")
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        self.runtime = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        runtime.exchanges.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: calls for any GPU, and between hosts, are there."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets it for later configurations of this process. AssertionError for an odd number."""
        check_even("set_num_sms", new_num_sms)
        next(base for base in cls.__mro__ if "num_sms" in vars(base)).num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """The configuration for `num_ranks`, or for the next smaller number that is listed."""
        return configs.config_of(cls._DISPATCH, num_ranks, cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """The configuration for `num_ranks`, or for the next smaller number that is listed."""
        return configs.config_of(cls._COMBINE, num_ranks, cls.num_sms)

    get_low_latency_rdma_size_hint = staticmethod(configs.get_low_latency_rdma_size_hint)

    def get_comm_stream(self) -> torch.Stream:
        """The stream of this buffer's calls on the current GPU; without a GPU, the CPU's."""
        runtime = self._runtime("get_comm_stream")
        if not torch.cuda.is_available():
            return torch.cpu.current_stream()
        return runtime.stream.of(torch.device("cuda", torch.cuda.current_device()))

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Memory of the size that the raw buffer would have, from `offset` bytes on, or of `size`.

        For callers that clear it. Weft has no raw buffer: nothing else reads or writes this memory.
        """
        self._runtime("get_local_buffer_tensor")
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        count = (num_bytes - offset) // dtype.itemsize
        shape = torch.Size([max(count, 0)] if size is None else size)
        check(
            offset >= 0 and shape.numel() <= count,
            f"get_local_buffer_tensor: {shape.numel()} elements of {dtype} from byte {offset} on "
            f"(expected at most {max(count, 0)} in {num_bytes} bytes)",
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)

    def _runtime(self, verb: str) -> Runtime:
        check(self.runtime is not None, f"{verb}: the buffer was destroyed (make a new one)")
        return self.runtime

    def _num_sms(self, verb: str, config: Config | None, device: torch.device) -> int:
        num_sms = self.num_sms if config is None else config.num_sms
        check_even(f"{verb}: config", num_sms)
        return num_sms if device.type == "cuda" else 0

    def _num_channels(self, config: Config | None) -> int:
        """The channels of a handle: `deep_ep` has one for two multiprocessors."""
        return (self.num_sms if config is None else config.num_sms) // 2

    def _timeout(self) -> float:
        """Seconds of every wait."""
        return TIMEOUT
