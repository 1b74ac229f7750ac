# SPDX-License-Identifier: Apache-2.0
"""What `register` makes a fleet of: blocks of rows for each expert, by `nixl_ep.Buffer`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.compat.deep_ep.checks import NotInWeft, check
from weft.compat.deep_ep.hooks import Hook
from weft.compat.nixl_ep import Buffer
from weft.compat.nixl_ep.buffer import NixlHandle

_FP8, _UE8M0 = {"FP8E4M3", "FP8E5M2", "NVFP8"}, "UE8M0"


class Fleet:
    """The ranks and their buffer, for algorithm LOW_LATENCY in layout EXPERT_MAJOR.

    Ranks grow and shrink by `update_topology`, up to FleetAlgoKnobTopologyCapacity. With
    FleetAlgoKnobFaultTolerance others can be masked; on CPUs of one host a rank that is lost is
    masked on all others by the call that loses it. Elsewhere a call with a rank that does not come
    raises after timeout_ms, and is made again without it once all others have masked it.
    """

    handle_class: type  # `FleetHandle` with FlashInfer's `Handle`

    def __init__(self, bootstrap: Any, params: Any, algo_knobs: Sequence[Any] = ()) -> None:
        """Collective. The ranks meet by bootstrap.tcp_store, else by its process_group, or the
        default one. Quantization is that of e4m3 with a scale for 128 elements."""
        for name, value, wanted in (
            ("algorithm", params.algorithm, "LOW_LATENCY"),
            ("layout", params.layout, "EXPERT_MAJOR"),
        ):
            if value.name != wanted:
                raise NotInWeft(f"Fleet: {name} = {value.name} (expected {wanted})")
        knobs = _by_name(algo_knobs)
        topology = knobs.get("FleetAlgoKnobTopologyCapacity")
        capacity = bootstrap.world_size if topology is None else topology.n
        check(
            capacity > 0 and params.num_experts % capacity == 0,
            f"Fleet: {params.num_experts} experts (expected a multiple of the {capacity} ranks)",
        )
        self._set_knobs(knobs)
        self.params, self.capacity, self._bootstrap = params, capacity, bootstrap
        tolerance = knobs.get("FleetAlgoKnobFaultTolerance")
        self._tolerance = tolerance if tolerance is not None and tolerance.enabled else None
        waits = getattr(self._tolerance, "timeout_ms", 0)
        self._store = getattr(bootstrap, "tcp_store", None)
        group = None
        if self._store is None:
            group = bootstrap.process_group or dist.group.WORLD
        self.buffer = Buffer(
            explicitly_destroy=True,
            rank=bootstrap.rank,
            group=group,
            tcp_store_group=self._store,
            **({"timeout_ms": waits} if waits else {}),
        )
        self.buffer.update_memory_buffers(capacity, params.num_experts // capacity, 0)
        self.buffer.connect_ranks(list(range(bootstrap.world_size)))
        self._epoch = 0
        self._known = self._active()  # when it was last set, cleared or changed on purpose
        self._is_destroyed = False

    def create_handle(self, params: Any, algo_knobs: Sequence[Any] = ()) -> Any:
        """Local: of one dispatch and its combine."""
        return self.handle_class(self, params, algo_knobs)

    def update_topology(self, bootstrap: Any, algo_knobs: Sequence[Any] = ()) -> None:
        """Collective among the ranks that stay and those that come, which make a fleet. The first
        bootstrap.world_size ranks are in it from now on."""
        old, new = self._bootstrap.world_size, bootstrap.world_size
        check(
            new <= self.capacity,
            f"update_topology: world_size = {new} (expected at most the capacity, {self.capacity})",
        )
        if getattr(bootstrap, "tcp_store", None) is not None:
            self._store = bootstrap.tcp_store
            self.buffer.set_tcp_store_group(self._store)
        if new < old:
            self.buffer.disconnect_ranks(list(range(new, old)))
        elif new > old:
            self.buffer.connect_ranks(list(range(old, new)))
        self._bootstrap = bootstrap
        self._known = self._active()
        if algo_knobs:
            self._set_knobs(_by_name(algo_knobs))

    def destroy(self) -> None:
        """Gives the memory back; once more does nothing."""
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
        """Local. int32 [world_size]: 1 for ranks that take part, else 0; in `out` if given."""
        self._check_tolerance("query_active_mask")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        active = torch.tensor(self._active(), dtype=torch.int32, device=device)
        return active if out is None else out.copy_(active)

    def query_fault(self) -> bool:
        """Local. Whether a call has masked ranks since the mask was set or faults were cleared."""
        self._check_tolerance("query_fault")
        return self._active() != self._known

    def set_active_mask(self, mask: Sequence[int] | Tensor) -> None:
        """Local, of all ranks that stay active. mask [world_size]: 1 for ranks that take part, this
        one among them."""
        self._check_tolerance("set_active_mask")
        active = [int(one) == 1 for one in (mask.tolist() if isinstance(mask, Tensor) else mask)]
        size, rank = self._bootstrap.world_size, self._bootstrap.rank
        check(len(active) == size, f"mask has {len(active)} numbers (expected {size})")
        check(active[rank], f"mask[{rank}] = 0 is this rank (expected another)")
        for other in set(range(size)) - {rank}:
            self.buffer.update_mask_buffer(other, mask=not active[other])
        self._known = self._active()
        self._epoch += 1

    def clear_faults(self, *, readmit: bool = False) -> None:
        """Local. readmit: all ranks that are not lost take part again; all of them call it."""
        self._check_tolerance("clear_faults")
        if readmit:
            self.buffer.clean_mask_buffer()
            self._epoch += 1
        self._known = self._active()

    def _active(self) -> list[int]:
        """[world_size] 1 for ranks that take part."""
        status = torch.empty(self.capacity, dtype=torch.int32, device="cpu")
        self.buffer.query_mask_buffer(status)
        return (status[: self._bootstrap.world_size] == 0).to(torch.int32).tolist()

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
        self.use_fp8, self.use_ue8m0 = bool(names & _FP8), _UE8M0 in names


class FleetHandle:
    """One dispatch and its combine. With HandleAlgoKnobSplitOperation what they return may be read
    after `complete`."""

    dispatch_class: Any  # FlashInfer's `DispatchOutput`
    combine_class: Any  # its `CombineOutput`

    def __init__(self, fleet: Fleet, params: Any, algo_knobs: Sequence[Any] = ()) -> None:
        knobs = _by_name(algo_knobs)
        self._fleet, self._ids = fleet, params.topk_ids
        self._weights = getattr(knobs.get("HandleAlgoKnobTopKWeights"), "weights", None)
        self._is_staged = "HandleAlgoKnobSplitOperation" in knobs
        self._handle: NixlHandle | None = None
        self._hook: Hook | None = None

    def update(self, params: Any) -> None:
        """The routing of the next dispatch, of the same shape. A CUDA graph keeps the memory of its
        capture: write into that."""
        ids, old = params.topk_ids, self._ids
        shapes = f"{list(ids.shape)} (expected {list(old.shape)})"
        check(ids.shape == old.shape, f"update: topk_ids has shape {shapes}")
        self._ids = ids

    def dispatch(self, params: Any) -> Any:
        """Collective. params.x[0] bf16 [T, H] to blocks [El, capacity * max_tokens_per_rank, H]."""
        fleet = self._fleet
        rows, counts, self._handle, _, self._hook = fleet.buffer.dispatch(
            params.x[0],
            self._ids,
            fleet.params.max_tokens_per_rank,
            fleet.params.num_experts,
            use_fp8=fleet.use_fp8,
            round_scale=fleet.use_ue8m0,
            use_ue8m0=fleet.use_ue8m0,
            return_recv_hook=self._is_staged,
        )
        rows, scales = rows if isinstance(rows, tuple) else (rows, None)
        return self.dispatch_class(
            expert_tensors=rows,
            num_tokens=rows.size(1),
            expert_counts=counts,
            expert_scales=scales,
        )

    def combine(self, params: Any) -> Any:
        """Collective. params.x[0] bf16 like the blocks, to [T, H]: rows times the weights of
        HandleAlgoKnobTopKWeights, added up; in params.out if given."""
        check(self._weights is not None, "combine without HandleAlgoKnobTopKWeights")
        combined, _, self._hook = self._fleet.buffer.combine(
            params.x[0],
            self._ids,
            self._weights,
            self._handle,
            return_recv_hook=self._is_staged,
            out=params.out,
        )
        return self.combine_class(x=combined)

    def complete(self) -> None:
        """The current stream's later work comes after the last call."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()

    def destroy(self) -> None:
        self._handle = self._hook = None


def _by_name(knobs: Sequence[Any]) -> dict[str, Any]:
    """By the names of their classes, of which the last one counts."""
    return {type(knob).__name__: knob for knob in knobs}
