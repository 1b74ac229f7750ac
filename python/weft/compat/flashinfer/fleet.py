# SPDX-License-Identifier: Apache-2.0
"""Base of the fleet that `register` makes, whose ranks connect and leave as those of
`nixl_ep.Buffer`. handles.py has the calls."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.compat.deep_ep.checks import NotInWeft, check
from weft.compat.nixl_ep import Buffer

from .handles import by_name
from .rows import FlatRows, RankBlocks, RowsBuffer, Sizes

_FP8, _UE8M0 = {"FP8E4M3", "FP8E5M2", "NVFP8"}, "UE8M0"
_LAYOUTS = {"EXPERT_MAJOR": Buffer, "RANK_MAJOR": RankBlocks}  # of LOW_LATENCY


class Fleet:
    """The ranks and their buffer, for algorithm LOW_LATENCY in layout EXPERT_MAJOR or RANK_MAJOR,
    or HIGH_THROUGHPUT, whose layout is its own.

    Ranks grow and shrink by `update_topology`, up to FleetAlgoKnobTopologyCapacity. With
    FleetAlgoKnobFaultTolerance others can be masked; a rank that is lost is masked on all others,
    by the call that loses it on CPUs, and as calls and queries hear of it on GPUs.
    """

    handle_class: type  # `FleetHandle` with FlashInfer's `Handle`
    rows_handle_class: type  # `RowsHandle` with it

    def __init__(self, bootstrap: Any, params: Any, algo_knobs: Sequence[Any] = ()) -> None:
        """Collective. Ranks connect by bootstrap.tcp_store, else its process_group, else the store
        of the default group, of which they may be some. Quantization is that of e4m3 with a
        scale for 128 elements, in layout EXPERT_MAJOR; FleetAlgoKnobFaultTolerance needs
        LOW_LATENCY."""
        knobs = by_name(algo_knobs)
        buffer_class = _buffer_class(params)
        topology = knobs.get("FleetAlgoKnobTopologyCapacity")
        capacity = bootstrap.world_size if topology is None else topology.n
        check(
            capacity > 0 and params.num_experts % capacity == 0,
            f"Fleet: {params.num_experts} experts (expected a multiple of the {capacity} ranks)",
        )
        self.params, self.capacity, self._bootstrap = params, capacity, bootstrap
        self._has_rows = issubclass(buffer_class, RowsBuffer)
        self._set_knobs(knobs)
        tolerance = knobs.get("FleetAlgoKnobFaultTolerance")
        self._tolerance = tolerance if tolerance is not None and tolerance.enabled else None
        if self._tolerance is not None and buffer_class is FlatRows:
            raise NotInWeft(
                "Fleet: FleetAlgoKnobFaultTolerance with algorithm = HIGH_THROUGHPUT (expected "
                "LOW_LATENCY: the interface has no masks elsewhere)"
            )
        waits = getattr(self._tolerance, "timeout_ms", 0)
        self._store = getattr(bootstrap, "tcp_store", None)
        group = bootstrap.process_group if self._store is None else None
        if self._store is None and group is None:
            group = dist.group.WORLD
            if hasattr(group, "get_group_store"):
                self._store, group = group.get_group_store(), None
        self.buffer = buffer_class(
            explicitly_destroy=True,
            rank=bootstrap.rank,
            group=group,
            tcp_store_group=self._store,
            **({"timeout_ms": waits} if waits else {}),
        )
        self.buffer.goes_on = self._tolerance is not None
        self.buffer.update_memory_buffers(capacity, params.num_experts // capacity, 0)
        self.buffer.connect_ranks(list(range(bootstrap.world_size)))
        self._epoch = 0
        self._known = self._active()  # at the last set, clear or change on purpose
        self._is_destroyed = False

    def create_handle(self, params: Any, algo_knobs: Sequence[Any] = ()) -> Any:
        """Local. Makes a handle for one dispatch and its combine."""
        handle_class = self.rows_handle_class if self._has_rows else self.handle_class
        return handle_class(self, params, algo_knobs)

    @property
    def sizes(self) -> Sizes:
        """The sizes of calls that send rows."""
        params = self.params
        sizes = (params.max_tokens_per_rank, params.num_experts, params.token_hidden_size)
        return Sizes(self._bootstrap.world_size, *sizes)

    def update_topology(self, bootstrap: Any, algo_knobs: Sequence[Any] = ()) -> None:
        """Makes the fleet the first bootstrap.world_size ranks. Collective among ranks that stay
        and ranks that join, which make a fleet."""
        old, new = self._bootstrap.world_size, bootstrap.world_size
        check(
            new <= self.capacity,
            f"update_topology: world_size = {new} (expected at most the capacity, {self.capacity})",
        )
        if algo_knobs:
            self._set_knobs(by_name(algo_knobs))  # what it refuses changes nothing
        if getattr(bootstrap, "tcp_store", None) is not None:
            self._store = bootstrap.tcp_store
            self.buffer.set_tcp_store_group(self._store)
        if new < old:
            self.buffer.disconnect_ranks(list(range(new, old)))
        elif new > old:
            self.buffer.connect_ranks(list(range(old, new)))
        self._bootstrap = bootstrap
        self._known = self._active()

    def destroy(self) -> None:
        """Frees the memory; a second call does nothing."""
        if not self._is_destroyed:
            self._is_destroyed = True
            self.buffer.destroy()

    @property
    def supports_fault_tolerance(self) -> bool:
        return self._tolerance is not None

    @property
    def active_mask_epoch(self) -> int:
        """How often the mask was set."""
        return self._epoch

    def query_active_mask(self, out: Tensor | None = None) -> Tensor:
        """Local. Returns int32 [world_size], in `out` if given: 1 for ranks that take part, else 0.
        On GPUs it also finds lost ranks, as `query_fault` does."""
        self._check_tolerance("query_active_mask")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        active = torch.tensor(self._active(), dtype=torch.int32, device=device)
        return active if out is None else out.copy_(active)

    def query_fault(self) -> bool:
        """Local. Returns whether a call masked ranks since the mask was set or faults cleared."""
        self._check_tolerance("query_fault")
        return self._active() != self._known

    def set_active_mask(self, mask: Sequence[int] | Tensor) -> None:
        """Sets the mask; local, on all ranks that stay active. mask [world_size]: 1 for ranks that
        take part, this one among them."""
        self._check_tolerance("set_active_mask")
        active = [int(one) == 1 for one in (mask.tolist() if isinstance(mask, Tensor) else mask)]
        size, rank = self._bootstrap.world_size, self._bootstrap.rank
        check(len(active) == size, f"mask has {len(active)} numbers (expected {size})")
        check(active[rank], f"mask[{rank}] = 0 is this rank (expected another)")
        status = self._status()
        for other in range(size):  # all of it, or nothing
            lost = f"mask[{other}] = 1 is lost (it has to come back first)"
            check(not active[other] or other not in self.buffer.lost_ranks(), lost)
            there = f"mask[{other}] = 1 is not connected"
            check(not active[other] or status[other] >= 0, there)
        for other in set(range(size)) - {rank}:
            self.buffer.update_mask_buffer(other, mask=not active[other])
        self._known = self._active()
        self._epoch += 1

    def clear_faults(self, *, readmit: bool = False) -> None:
        """Local. Clears faults. readmit: all ranks not lost take part again; all call it."""
        self._check_tolerance("clear_faults")
        if readmit:
            self.buffer.clean_mask_buffer()
            self._epoch += 1
        self._known = self._active()

    def _active(self) -> list[int]:
        """Returns [world_size]: 1 for active ranks."""
        return [int(one == 0) for one in self._status()[: self._bootstrap.world_size]]

    def _status(self) -> list[int]:
        """Returns what `query_mask_buffer` says of each rank."""
        status = torch.empty(self.capacity, dtype=torch.int32, device="cpu")
        self.buffer.query_mask_buffer(status)
        return status.tolist()

    def _check_tolerance(self, name: str) -> None:
        if self._tolerance is None:
            self._no_fault_tolerance(name)  # FlashInfer's, which raises
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        check(not is_capturing, f"{name} while a CUDA graph is captured")

    def _ft_knob(self) -> Any:
        return self._tolerance

    def _ft_store(self) -> dist.Store:
        check(self._store is not None, "reconcile_active_mask without bootstrap.tcp_store")
        return self._store

    def _set_knobs(self, knobs: dict[str, Any]) -> None:
        quantization = knobs.get("FleetAlgoKnobQuantization")
        names = {one.name for one in getattr(quantization, "quants", ())}
        if names and self._has_rows:
            raise NotInWeft(
                f"Fleet: FleetAlgoKnobQuantization of {sorted(names)} (expected algorithm = "
                "LOW_LATENCY and layout = EXPERT_MAJOR: only their receivers take scales)"
            )
        self.use_fp8, self.use_ue8m0 = bool(names & _FP8), _UE8M0 in names


def _buffer_class(params: Any) -> type[Buffer]:
    if params.algorithm.name == "HIGH_THROUGHPUT":
        return FlatRows
    for name, value, known in (
        ("algorithm", params.algorithm, {"LOW_LATENCY": None}),
        ("layout", params.layout, _LAYOUTS),
    ):
        if value.name not in known:
            raise NotInWeft(f"Fleet: {name} = {value.name} (expected {' or '.join(known)})")
    return _LAYOUTS[params.layout.name]
