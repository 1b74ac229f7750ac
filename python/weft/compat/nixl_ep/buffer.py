# SPDX-License-Identifier: Apache-2.0
"""`Buffer` of NIXL EP: the low-latency calls of DeepEP under other names, on ranks that find each
other by a store."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group
from weft.compat.deep_ep import EventOverlap
from weft.compat.deep_ep.buffer import Buffer as DeepEPBuffer
from weft.compat.deep_ep.checks import NotInWeft, check, check_least, check_tensor
from weft.compat.deep_ep.config import get_low_latency_rdma_size_hint
from weft.compat.deep_ep.handles import Handle, LowLatencyHandle
from weft.compat.deep_ep.low_latency import Hook
from weft.compat.deep_ep.runtime import Call, MpiGroup, Runtime

from .store import StoreRanks

_ROW_MULTIPLE = 4  # of the rows of a block
_NOT_CONNECTED = -1  # in a mask


class NixlHandle(LowLatencyHandle):
    """(src_info, layout_range, num_max, H), as `LowLatencyHandle` explains them."""

    items = LowLatencyHandle.items[:4]


class Buffer(DeepEPBuffer):
    """One rank's end of the exchange. First `update_memory_buffers`, then `connect_ranks` of all
    ranks; they make the same calls in order from then on, and cannot become more or fewer."""

    _HANDLE = NixlHandle
    _LOSES_RANKS = False

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: dist.ProcessGroup | None = None,
        comm: Any = None,
        tcp_store_group: dist.Store | None = None,
        timeout_ms: int = 30000,
    ) -> None:
        """Local. rank: this one's number, also its number in the group. The ranks meet by `group`,
        else by `comm` of mpi4py, else by a store of torch.distributed. timeout_ms: of every wait
        for another rank. disable_ll_nvlink has no effect: links are found out."""
        del disable_ll_nvlink
        check_least("Buffer: timeout_ms", timeout_ms)
        check_least("Buffer: rank", rank, 0)
        self.rank = rank
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.timeout_ms = timeout_ms
        self.group_size = 0  # the capacity
        self.num_experts_per_rank = self.num_rdma_bytes = self.num_nvl_bytes = 0
        self.runtime: Runtime | None = None
        self.group, self.comm, self.tcp_store_group = group, comm, tcp_store_group
        self._is_destroyed = False

    def update_memory_buffers(
        self,
        num_ranks: int,
        num_experts_per_rank: int,
        num_rdma_bytes: int,
        num_nvl_bytes: int = 0,
    ) -> None:
        """Local. num_ranks: how many `connect_ranks` will bring together. Sizes in bytes are only
        kept: memory is taken when the first call shows what is needed."""
        self._check_alive()
        check_least("update_memory_buffers: num_ranks", num_ranks)
        check_least("update_memory_buffers: num_experts_per_rank", num_experts_per_rank)
        check(
            self.rank < num_ranks,
            f"update_memory_buffers: num_ranks = {num_ranks} (expected more than this rank, "
            f"{self.rank})",
        )
        if self.runtime is not None and num_ranks != self.group_size:
            raise NotInWeft(
                f"update_memory_buffers: num_ranks = {num_ranks} with {self.group_size} connected "
                "ranks (Weft's groups keep their size)"
            )
        self.group_size, self.num_experts_per_rank = num_ranks, num_experts_per_rank
        self.num_rdma_bytes, self.num_nvl_bytes = num_rdma_bytes, num_nvl_bytes

    def set_tcp_store_group(self, tcp_store_group: dist.Store | None) -> None:
        """Local. Where a later `connect_ranks` meets the others."""
        self.tcp_store_group = tcp_store_group

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """Collective. remote_ranks: all ranks from 0 on, as many as `update_memory_buffers` was
        told; with or without this one. Nothing if they are connected already.

        Fewer ranks, more of them later, and activate=False raise NotImplementedError (also
        `weft.Unsupported`). What one rank refuses, all do.
        """
        if self.runtime is not None:
            with Call("connect_ranks", self._pool):
                new = sorted(set(remote_ranks) - set(range(self.group_size)))
                if new:
                    raise NotInWeft(
                        f"connect_ranks: ranks {new} beside the {self.group_size} connected ones "
                        "(Weft's groups do not grow)"
                    )
            return
        self._check_alive()
        check(self.group_size > 0, "connect_ranks: update_memory_buffers comes first")

        def check_ranks() -> None:
            if not activate:
                check(self.low_latency_mode, "connect_ranks: activate = False in normal mode")
                raise NotInWeft("connect_ranks: activate = False (Weft's groups do not grow)")
            wanted = sorted({*remote_ranks, self.rank})
            if wanted != list(range(self.group_size)):
                raise NotInWeft(
                    f"connect_ranks: ranks {wanted} of a capacity of {self.group_size} on rank "
                    f"{self.rank} (expected all of them: Weft's groups do not grow)"
                )

        group, comm = self.group, self.comm
        if group is not None:
            self._agree(Group.of(group), check_ranks)
        elif comm is not None:
            self._agree(MpiGroup(comm), check_ranks)
        else:
            if self.tcp_store_group is None:
                raise ValueError("connect_ranks: neither group nor comm nor a store is given")
            comm = StoreRanks(self.tcp_store_group, self.rank, self.group_size)
            equal = f"num_ranks = {self.group_size}"
            comm.agreed("connect_ranks", check_ranks, equal)
        sizes = self.num_rdma_bytes, self.num_nvl_bytes  # of any multiple
        super().__init__(
            group,
            0,
            0,
            self.low_latency_mode,
            explicitly_destroy=self.explicitly_destroy,
            enable_shrink=True,
            comm=comm,
        )
        self.num_rdma_bytes, self.num_nvl_bytes = sizes
        self.group = group  # or None, as it was given

    def disconnect_ranks(self, remote_ranks: Sequence[int]) -> None:
        """Raises NotImplementedError, here and in the call that the other ranks make."""
        with Call("disconnect_ranks", self._pool):
            raise NotInWeft(
                f"disconnect_ranks: ranks {list(remote_ranks)} (Weft's groups do not shrink; "
                "update_mask_buffer leaves a rank out that still makes its calls)"
            )

    def barrier(self) -> None:
        """Collective. Waits for this rank's GPU and for all ranks, on the host."""
        runtime = self._runtime()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        runtime.group.all_gather(b"")

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of an RDMA buffer for calls of this size; Weft needs none."""
        num_rows = num_ranks * num_max_dispatch_tokens_per_rank
        check(
            num_rows % _ROW_MULTIPLE == 0,
            f"get_rdma_size_hint: num_ranks * num_max_dispatch_tokens_per_rank = {num_rows} "
            f"(expected a multiple of {_ROW_MULTIPLE})",
        )
        return get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    get_rdma_size_hint = get_low_latency_rdma_size_hint = get_low_latency_buffer_size_hint

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, NixlHandle, EventOverlap, Hook | None]:
        """Collective. That of `weft.compat.deep_ep.Buffer`, whose documentation explains it.
        num_experts None: those of all ranks. The handle has four items."""
        if num_experts is None:
            num_experts = self.group_size * self.num_experts_per_rank
        return super().low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )

    dispatch = low_latency_dispatch
    combine = DeepEPBuffer.low_latency_combine
    get_next_combine_buffer = DeepEPBuffer.get_next_low_latency_combine_buffer

    def ht_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """Collective. `dispatch` of `weft.compat.deep_ep.Buffer`, whose documentation explains
        it."""
        layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank)
        given = (num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, 0, config)
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        return super().dispatch(x, handle, *layout, *given, *streams)

    ht_combine = DeepEPBuffer.combine

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local. Leaves another rank out of low-latency calls, or takes it in again. A masked rank
        must still make its calls."""
        with Call("update_mask_buffer"):
            is_other = rank_to_mask != self.rank
            check(not mask or is_other, f"rank_to_mask = {rank_to_mask} is this rank (another)")
            self.low_latency_update_mask_buffer(rank_to_mask, mask)

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        """Local. Fills mask_status int32 [num_ranks]: 0 for ranks that take part, else nonzero."""
        with Call("query_mask_buffer"):
            check_tensor("mask_status", mask_status, torch.int32, [self.group_size])
        if self.runtime is not None:
            self.low_latency_query_mask_buffer(mask_status)
            return
        self._check_alive()
        mask_status.fill_(_NOT_CONNECTED)
        mask_status[self.rank : self.rank + 1] = 0

    def clean_mask_buffer(self) -> None:
        """Local. Takes all ranks in again."""
        self.low_latency_clean_mask_buffer()

    def destroy(self) -> None:
        """Waits for this rank's GPU and gives the memory back; the buffer is of no use then.

        AssertionError without explicitly_destroy.
        """
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        if self.runtime is not None:
            super().destroy()
        self._is_destroyed = True

    def _check_alive(self) -> None:
        check(not self._is_destroyed, "the buffer was destroyed (make a new one)")

    def _runtime(self) -> Runtime:
        self._check_alive()
        check(self.runtime is not None, "no ranks are connected (connect_ranks comes first)")
        return self.runtime

    def _timeout(self) -> float:
        return self.timeout_ms / 1000

    def _agree(self, ranks: Group, check_ranks: Callable[[], None]) -> None:
        """Collective: the checks, on all ranks of the group, which number themselves as it does."""

        def check_all() -> None:
            here, found = (self.rank, self.group_size), (ranks.rank, ranks.num_ranks)
            check(
                here == found,
                f"connect_ranks: (rank, num_ranks) = {here} (expected {found}, the group's)",
            )
            check_ranks()

        ranks.agreed("connect_ranks", check_all)
