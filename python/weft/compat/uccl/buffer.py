# SPDX-License-Identifier: Apache-2.0
"""`Buffer` and `UCCLBuffer`, which NeMo Automodel calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft import Group, InvalidArgument
from weft.compat import environment
from weft.compat.deep_ep import config as configs
from weft.compat.deep_ep.buffer import Buffer as DeepEPBuffer
from weft.compat.deep_ep.buffer import check_even
from weft.compat.deep_ep.config import Config
from weft.compat.deep_ep.low_latency_handle import LowLatencyHandle
from weft.compat.deep_ep.runtime import TIMEOUT

from .config import COMBINE, DISPATCH
from .fabric import adopt_network


class Buffer(DeepEPBuffer):
    """That of `weft.compat.deep_ep` with UCCL's arguments and tables; see there for the calls."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        is_intranode: bool | None = None,
    ) -> None:
        """Collective. is_intranode None: found out. No environment variable is needed; UCCL's
        choice of network is honoured.

        ValueError for is_intranode=True on a group that is larger than a host has ranks, or whose
        ranks do not all share memory.
        """
        adopt_network()
        on_one_host = is_on_one_host(group)
        if is_intranode and not on_one_host:
            raise InvalidArgument(
                f"Buffer: is_intranode = True with {group.size()} ranks in "
                f"{len(Group.of(group).domains)} domains "
                f"(expected at most {local_world_size()}, those of a host, in one)"
            )
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            allow_nvlink_for_low_latency_mode,
            allow_mnnvl,
            explicitly_destroy=explicitly_destroy,
        )
        self.is_intranode = on_one_host if is_intranode is None else is_intranode

    def _timeout(self) -> float:
        return float(environment.number("UCCL_EP_CPU_TIMEOUT_SECS", default=int(TIMEOUT)))

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Of all later configurations of this process. AssertionError for an odd number."""
        check_even("set_num_sms", new_num_sms)
        Buffer.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """For dispatch among `num_ranks`; for a number that is not listed, of the next smaller."""
        return configs.config_of(DISPATCH, num_ranks, cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """For combine among `num_ranks`; for a number that is not listed, of the next smaller."""
        return configs.config_of(COMBINE, num_ranks, cls.num_sms)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        *args: Any,
        overlap: bool = False,
        **kwargs: Any,
    ) -> tuple:
        """As there; overlap=True raises NotImplementedError."""
        if overlap:
            raise NotImplementedError(
                "low_latency_combine: overlap is asked for (a call begins when x is whole)"
            )
        return super().low_latency_combine(x, topk_idx, topk_weights, handle, *args, **kwargs)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = True,
    ) -> torch.Tensor:
        """Memory of the RDMA buffer's size, whatever use_rdma_buffer says."""
        return super().get_local_buffer_tensor(dtype, size, offset, use_rdma_buffer=True)

    def reset_rdma_buffer(self) -> None:
        """Nothing: Weft has no RDMA buffer that a caller must clear."""
        self._runtime("reset_rdma_buffer")

    def connect_atomic_buffer(self, proxy: Any) -> None:
        """Nothing: Weft has no proxies."""
        self._runtime("connect_atomic_buffer")


class UCCLBuffer(Buffer):
    """NeMo Automodel's: a group that fits on one host needs no RDMA bytes."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        is_intranode: bool = False,
    ) -> None:
        """Collective. num_rdma_bytes becomes 0 for a group that fits on one host."""
        if is_on_one_host(group):
            num_rdma_bytes, is_intranode = 0, True
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            allow_nvlink_for_low_latency_mode,
            allow_mnnvl,
            explicitly_destroy,
            is_intranode,
        )


def local_world_size() -> int:
    """Ranks of a host: LOCAL_WORLD_SIZE, else its GPUs, else 1."""
    return environment.number("LOCAL_WORLD_SIZE", default=max(torch.cuda.device_count(), 1))


def is_on_one_host(group: dist.ProcessGroup) -> bool:
    """Collective at the first call for a group. Not more ranks than a host has may still be ranks
    of several."""
    return group.size() <= local_world_size() and len(Group.of(group).domains) == 1
