# SPDX-License-Identifier: Apache-2.0
"""`Buffer` of NIXL EP: the low-latency calls of DeepEP under other names, on ranks that find each
other by a store and may become more or fewer."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.compat.deep_ep import EventOverlap
from weft.compat.deep_ep.buffer import Buffer as DeepEPBuffer
from weft.compat.deep_ep.checks import NotInWeft, check, check_least, check_tensor
from weft.compat.deep_ep.config import get_low_latency_rdma_size_hint
from weft.compat.deep_ep.handles import Handle, LowLatencyHandle
from weft.compat.deep_ep.hooks import Hook, LastHooks
from weft.compat.deep_ep.masks import CallRanks
from weft.compat.deep_ep.runtime import Call, ExchangePool, Runtime, timeout_of
from weft.compat.deep_ep.store import Meeting
from weft.errors import PeerError, RanksLost
from weft.streams import CommStream

_ROW_MULTIPLE = 4  # of the rows of a block
_NOT_CONNECTED = -1  # in a mask
_TIMEOUT_MS = 30000  # of every wait


class NixlHandle(LowLatencyHandle):
    """(src_info, layout_range, num_max, H): see `LowLatencyHandle`."""

    items = LowLatencyHandle.items[:4]
    runtime: Runtime  # of the ranks that made it


class Buffer(DeepEPBuffer):
    """One rank's end of the exchange. First `update_memory_buffers`, then `connect_ranks`.

    The ranks of a low-latency call are those that are connected and not masked: they make the same
    calls in order, with the same mask, while other ranks make none or their own. Such ranks connect
    in their first call. In low-latency mode a rank that does not come within timeout_ms is lost, if
    ranks were connected by a store, and one that comes with another mask makes the others raise
    `weft.TimeoutError`; elsewhere an absent rank makes them raise after 300 s. Their connection
    stays until one of them is disconnected.

    In low-latency mode calls go on without ranks that die, leave or let the deadline pass: such
    ranks are lost, which masks them on all others alike: with CPU tensors when the call returns,
    with CUDA tensors as `weft.compat.deep_ep.low_latency.LowLatencyMode` explains. A lost rank
    comes back by `connect_ranks`. In normal mode its end makes the others raise.
    """

    _HANDLE = NixlHandle
    enable_shrink = False  # set by each dispatch

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: dist.ProcessGroup | None = None,
        comm: Any = None,
        tcp_store_group: dist.Store | None = None,
        timeout_ms: int = _TIMEOUT_MS,
    ) -> None:
        """Local. rank: this rank's number, also in the group. Ranks connect by `group`, else by
        `comm` of mpi4py, else by a store of torch.distributed. timeout_ms: of every wait for
        another rank. disable_ll_nvlink has no effect: links are detected."""
        del disable_ll_nvlink
        check_least("Buffer: timeout_ms", timeout_ms)
        check_least("Buffer: rank", rank, 0)
        self.rank = rank
        self.low_latency_mode = low_latency_mode
        # True if calls may go on without ranks that are lost; set before ranks are connected.
        self.goes_on: bool = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.timeout_ms = timeout_ms
        self.group_size = 0  # the capacity
        self.num_experts_per_rank = self.num_rdma_bytes = self.num_nvl_bytes = 0
        self.runtime: Runtime | None = None  # of the ranks of the last call
        self.group, self.comm, self.tcp_store_group = group, comm, tcp_store_group
        self._meeting = Meeting(rank, group, None if group is not None else comm)
        self._meeting.store = tcp_store_group
        self._remote: list[int] | None = None  # connected, in order
        self._masked: set[int] = set()  # of _remote
        self._lost: set[int] = set()  # of _masked
        self._runtimes: dict[tuple[int, ...], Runtime] = {}
        self._masks: dict[tuple, CallRanks] = {}
        self._stream = CommStream()
        self._hooks = LastHooks()
        self._pinned: Runtime | None = None  # the current call's
        self._is_destroyed = False

    def update_memory_buffers(
        self,
        num_ranks: int,
        num_experts_per_rank: int,
        num_rdma_bytes: int,
        num_nvl_bytes: int = 0,
    ) -> None:
        """Local. Sets the capacity: num_ranks may ever be connected, the same on all ranks. Sizes
        in bytes are only kept: memory is taken when the first call shows what is needed."""
        self._check_alive()
        check_least("update_memory_buffers: num_ranks", num_ranks)
        check_least("update_memory_buffers: num_experts_per_rank", num_experts_per_rank)
        check(
            self.rank < num_ranks,
            f"update_memory_buffers: num_ranks = {num_ranks} (expected more than this rank, "
            f"{self.rank})",
        )
        sizes = (num_ranks, num_experts_per_rank)
        had = (self.group_size, self.num_experts_per_rank)
        if self._remote is not None and sizes != had:
            raise NotInWeft(
                f"update_memory_buffers: (num_ranks, num_experts_per_rank) = {sizes} of connected "
                f"ranks (expected {had}: the capacity stays)"
            )
        self.group_size, self.num_experts_per_rank = sizes
        self.num_rdma_bytes, self.num_nvl_bytes = num_rdma_bytes, num_nvl_bytes

    def set_tcp_store_group(self, tcp_store_group: dist.Store | None) -> None:
        """Local. Sets the store by which ranks connect; None keeps the old."""
        self.tcp_store_group = tcp_store_group
        self._meeting.store = tcp_store_group or self._meeting.store

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """Connects remote_ranks with this rank and its connected ones, collective among all these;
        does nothing if they are connected. remote_ranks are in any order, with or without this
        rank. What one rank refuses, all do. A lost rank's place is taken by the same process or
        another.

        activate=False: new ranks are masked until `update_mask_buffer` takes them in. A buffer for
        normal mode connects all ranks of its capacity, and once.
        """
        with Call("connect_ranks"):
            self._check_alive()
            check(self.group_size > 0, "update_memory_buffers comes first")
            known = {self.rank, *(self._remote or ())} - self._lost
            new = [rank for rank in dict.fromkeys(remote_ranks) if rank not in known]
            if not new and self._remote is not None:
                return
            ranks = tuple(sorted([*known, *new]))

            def check_ranks() -> None:
                self._check_connection(ranks, activate)

            sizes = f"num_ranks = {self.group_size} of {self.num_experts_per_rank} experts"
            self._meeting.agreed(ranks, "connect_ranks", check_ranks, sizes)
            self._lost.difference_update(new)
            self._masked.difference_update(new)
            if not activate:
                self._masked.update(new)
            self._remote = list(dict.fromkeys([*(self._remote or ()), *new]))

    def disconnect_ranks(self, remote_ranks: Sequence[int]) -> None:
        """Disconnects remote_ranks, connected ones in any order; local, on all ranks that stay.
        Waits for this rank's GPU and frees the memory of calls with them."""
        with Call("disconnect_ranks"):
            self._check_alive()
            gone, remote = set(remote_ranks), self._remote or []
            check(
                gone <= set(remote),
                f"remote_ranks = {list(remote_ranks)} (expected some of {remote}, the connected)",
            )
            self._remote = [rank for rank in remote if rank not in gone]
            self._masked -= gone
            self._lost -= gone
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            for ranks in [ranks for ranks in self._runtimes if gone & set(ranks)]:
                self._runtimes.pop(ranks).exchanges.close()
            self.runtime = None

    def barrier(self) -> None:
        """Collective. Waits for this rank's GPU and for the ranks of a call, on the host. If ranks
        connect by a store, those absent after timeout_ms are masked."""
        among = self._call_ranks()
        ranks = tuple(rank for rank in among if rank not in self._lost)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        absent = self._meeting.absent(ranks, self._timeout())
        if absent is None:
            met = self._runtime().group if ranks == among else self._meeting.of(ranks)
            met.all_gather(b"")
        else:
            self._masked.update(absent)

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns RDMA buffer bytes for such calls; Weft needs none."""
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
        """Collective. Dispatches as `weft.compat.deep_ep.Buffer` does; see there. num_experts: of R
        ranks, for blocks of R * num_max rows; R covers the connected ranks, up to the capacity;
        None: the capacity's. An expert of a rank without part in the call is no choice.
        dispatch_wait_recv_cost_stats has R numbers. The handle has four items.
        """
        runtime = self._runtime()  # which may lose ranks
        ranks = self._call_ranks()
        if num_experts is None:
            num_experts = self.group_size * self.num_experts_per_rank
        self._mask = self._mask_of(ranks)
        self.enable_shrink = isinstance(x, Tensor) and runtime.exchanges.can_lose(x.device)
        with self._by(ranks, runtime):
            *made, handle, event, hook = super().low_latency_dispatch(
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
        handle.ranks, handle.runtime = ranks, runtime
        return *made, handle, event, hook

    @functools.wraps(DeepEPBuffer.low_latency_combine)
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        *args: Any,
        **more: Any,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Combines among the dispatch's ranks; ranks masked since are skipped."""
        if not isinstance(handle, NixlHandle):  # which is refused
            return super().low_latency_combine(x, topk_idx, topk_weights, handle, *args, **more)
        masked = frozenset(set(handle.ranks) - set(self._call_ranks()))
        self._mask = self._mask_of(handle.ranks, masked)
        with self._by(handle.ranks, handle.runtime):
            return super().low_latency_combine(x, topk_idx, topk_weights, handle, *args, **more)

    dispatch = low_latency_dispatch
    combine = low_latency_combine
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
        """Collective. Calls `dispatch` of `weft.compat.deep_ep.Buffer`; see there."""
        layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank)
        given = (num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, 0, config)
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        return super().dispatch(x, handle, *layout, *given, *streams)

    ht_combine = DeepEPBuffer.combine

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local. Leaves another rank out of low-latency calls from the next dispatch on, or takes
        a connected rank in again, unless it is lost. All ranks of a call do so; a combine is made
        by its dispatch's ranks, and skips those masked by then."""
        with Call("update_mask_buffer"):
            self._check_alive()
            most = self.group_size - 1
            is_rank = 0 <= rank_to_mask <= most
            check(is_rank, f"rank_to_mask = {rank_to_mask} (expected 0 to {most})")
            is_other = rank_to_mask != self.rank
            check(not mask or is_other, f"rank_to_mask = {rank_to_mask} is this rank (another)")
            is_connected = rank_to_mask in (self.rank, *(self._remote or ()))
            check(mask or is_connected, f"rank_to_mask = {rank_to_mask} is not connected")
            is_lost = rank_to_mask in self._lost
            check(
                mask or not is_lost, f"rank_to_mask = {rank_to_mask} is lost (connect_ranks first)"
            )
            if not mask:
                self._masked.discard(rank_to_mask)
            elif is_connected:
                self._masked.add(rank_to_mask)

    def lost_ranks(self) -> frozenset[int]:
        """Local. Returns ranks lost to a call and not connected since."""
        return frozenset(self._lost)

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        """Local. Fills mask_status int32 [num_ranks]: 0 for ranks that take part, 1 for those that
        are masked or lost, -1 for those that are not connected."""
        with Call("query_mask_buffer"):
            self._check_alive()
            check(self.group_size > 0, "update_memory_buffers comes first")
            check_tensor("mask_status", mask_status, torch.int32, [self.group_size])
            self._look()
            found = [_NOT_CONNECTED] * self.group_size
            for rank in (self.rank, *(self._remote or ())):
                found[rank] = int(rank in self._masked)
            mask_status.copy_(torch.tensor(found, dtype=torch.int32, device="cpu"))

    def clean_mask_buffer(self) -> None:
        """Local. Takes all connected ranks in again that are not lost."""
        with Call("clean_mask_buffer"):
            self._check_alive()
            self._masked &= self._lost

    # Names of the same calls in the base class.
    low_latency_update_mask_buffer = update_mask_buffer
    low_latency_query_mask_buffer = query_mask_buffer
    low_latency_clean_mask_buffer = clean_mask_buffer

    def destroy(self) -> None:
        """Waits for this rank's GPU and frees the memory; the buffer is unusable then.

        While a handle of the buffer is alive, others' calls still wait for this rank.
        AssertionError without explicitly_destroy.
        """
        self._check_alive()
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        self._is_destroyed = True
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for runtime in self._runtimes.values():
            runtime.exchanges.close()
        self._runtimes.clear()
        self.runtime = None

    def _check_alive(self) -> None:
        check(not self._is_destroyed, "the buffer was destroyed (make a new one)")

    def _check_connection(self, ranks: tuple[int, ...], activate: bool) -> None:
        """Checks arguments of `connect_ranks`; ranks: all that would be connected."""
        capacity, given = self.group_size, f"ranks {list(ranks)} of a capacity of {self.group_size}"
        check(
            ranks[0] >= 0 and ranks[-1] < capacity,
            f"connect_ranks: {given} (expected 0 to {capacity - 1})",
        )
        if self.low_latency_mode:
            return
        check(activate, "connect_ranks: activate = False in normal mode")
        if len(ranks) < capacity:
            raise NotInWeft(f"connect_ranks: {given} in normal mode (expected all of them)")

    def _call_ranks(self) -> tuple[int, ...]:
        """Returns the ranks of a call: connected and not masked, and lost ranks that an exchange on
        GPUs already does without."""
        self._check_alive()
        check(self._remote is not None, "no ranks are connected (connect_ranks comes first)")
        ranks = {self.rank, *self._remote} - self._masked
        for known, runtime in self._runtimes.items() if self._lost else ():
            if ranks == set(known) - self._left_out(known, runtime):
                return known
        return tuple(sorted(ranks))

    def _left_out(self, ranks: tuple[int, ...], runtime: Runtime) -> set[int]:
        """Returns the lost ranks that exchanges on GPUs do without and that have not come back."""
        return self._lost.intersection(ranks[at] for at in runtime.exchanges.lost_on_gpus)

    def _mask_of(self, ranks: tuple[int, ...], without: frozenset[int] = frozenset()) -> CallRanks:
        """Returns a cached `CallRanks`."""
        key = (ranks, without)
        if key not in self._masks:
            self._masks[key] = CallRanks(*key, self._masked)
        return self._masks[key]

    def _timeout(self) -> float:
        """Returns any wait's limit."""
        return timeout_of(self.timeout_ms / 1000, _TIMEOUT_MS / 1000)

    def _runtime(self) -> Runtime:
        """Returns the call's runtime. Collective at its ranks' first call."""
        if self._pinned is not None:
            return self._pinned
        ranks = self._call_ranks()
        old = self._runtimes.get(ranks)
        if old is None or len(self._left_out(ranks, old)) < len(old.exchanges.lost):
            ranks = self._comers(ranks)
            lose = functools.partial(_lose, ranks, self._masked, self._lost)
            on_loss = lose if self.goes_on else None
            new = Runtime(self._meeting.of(ranks), self._timeout(), on_loss)
            new.stream = self._stream
            self._runtimes[ranks] = new
        self.runtime = self._runtimes[ranks]
        return self.runtime

    def _comers(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Returns those of `ranks` that come to their first call, collective among them; the others
        are lost."""
        came = self._meeting.comers(ranks, self._timeout()) if self.goes_on else ranks
        is_late = self.rank not in came
        absent = set(ranks).difference({self.rank} if is_late else came)
        self._masked |= absent
        self._lost |= absent
        if is_late:
            text = f"rank {self.rank} was given up by ranks {list(came)}, which have waited for it"
            raise PeerError(f"{text} at the first call of {list(ranks)}", "peer failed", self.rank)
        return came

    @contextlib.contextmanager
    def _by(self, ranks: tuple[int, ...], runtime: Runtime) -> Iterator[None]:
        """Pins `runtime` for a call of `ranks`. If the others have gone on without this rank, all
        of them become lost here."""
        self._pinned = runtime
        try:
            yield
        except RanksLost:
            raise
        except PeerError:
            if runtime.exchanges.loses_ranks:
                others = set(ranks) - {self.rank}
                self._masked |= others
                self._lost |= others
                self._runtimes.pop(ranks, None)  # they meet anew
            raise
        finally:
            self._pinned = None

    def _look(self) -> None:
        """Looks for losses in the last call's exchanges, if its ranks stay."""
        runtime = self.runtime
        if runtime is not None and self._runtimes.get(self._call_ranks()) is runtime:
            self._look_at(runtime.exchanges)

    @property
    def _pool(self) -> ExchangePool | None:
        is_ready = self._remote is not None and not self._is_destroyed
        return self._runtime().exchanges if is_ready else None

    def _comm_stream(self) -> CommStream:
        self._check_alive()
        return self._stream

    def _block_ranks(self, num_experts: int) -> int:
        local, least = self.num_experts_per_rank, max(self._call_ranks()) + 1
        ranks, rest = divmod(num_experts, local)
        check(
            rest == 0 and least <= ranks <= self.group_size,
            f"num_experts = {num_experts} (expected {local} for each of {least} to "
            f"{self.group_size} ranks)",
        )
        return ranks


def _lose(ranks: tuple[int, ...], masked: set[int], lost: set[int], places: Iterable[int]) -> None:
    """Masks lost ranks; places: their indices in `ranks`."""
    gone = {ranks[place] for place in places}
    masked |= gone
    lost |= gone
