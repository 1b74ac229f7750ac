# SPDX-License-Identifier: Apache-2.0
"""The interface of UltraEP's manager, on Weft: experts get replicas for a micro-batch, planned from
exact counts. `weft.compat.install("ultra_ep")` makes `import ultra_ep` mean this module.

A physical expert is a place of an expert's weights: rank r has those from r * (M + R) on, its M
masters, then its R replicas, whose places all layers share. The calls move weights and gradients;
tokens go to physical experts by whatever exchange the caller has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group, _core
from weft.compat import environment
from weft.compat.deep_ep.checks import (
    INTEGERS,
    NotInWeft,
    check,
    check_least,
    check_tensor,
)
from weft.compat.deep_ep.ep.balance import carry_by
from weft.compat.deep_ep.runtime import Call, ExchangePool, without_gradients
from weft.compat.deep_ep.utils.event import EventOverlap, event_of
from weft.compat.exact_load import planned_by
from weft.copies import add_gradients, put_weights, sends_of
from weft.planner import PlannedBalance
from weft.streams import CommStream

__all__ = ["EventOverlap", "Manager"]


class _Masters(NamedTuple):
    """Weights and gradients of a layer's masters, a tensor for each expert of this rank."""

    weights: tuple[Sequence[Tensor], Sequence[Tensor]]  # of fc1 and of fc2
    grads: tuple[Sequence[Tensor], Sequence[Tensor]]


class Manager:
    """Replicas of experts of num_layers layers. Each rank has num_local_master_experts (M) experts
    per layer and num_local_redundant_experts (R) places for others'.

    Collective. expert_fc1_numel, expert_fc2_numel: elements of an expert's two weights, in bf16;
    gradients are fp32. is_train: there are gradients. max_microbatches: placements that a layer
    keeps. Calls raise InvalidArgument (also an AssertionError).

    redundant_fc1_weights, redundant_fc2_weights bf16 [R, elements]: of the replicas;
    redundant_fc1_grads, redundant_fc2_grads fp32 [R, elements], None unless is_train. On the GPU if
    there is one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_layers: int,
        num_local_master_experts: int,
        num_local_redundant_experts: int,
        expert_fc1_numel: int,
        expert_fc2_numel: int,
        is_train: bool = True,
        explicitly_destroy: bool = False,
        max_microbatches: int = 1,
        legacy_placement: bool = False,
    ) -> None:
        self._group = Group.of(group)
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        self.num_layers = num_layers
        self.num_local_master_experts = num_local_master_experts
        self.num_local_redundant_experts = num_local_redundant_experts
        self.num_experts = num_local_master_experts * self.num_ranks
        self.is_train, self.explicitly_destroy = is_train, explicitly_destroy
        self.max_microbatches = max_microbatches
        self._numels = (expert_fc1_numel, expert_fc2_numel)
        self._min_rows = self._group.agreed("Manager", lambda: self._settled(legacy_placement))
        sizes = (num_layers, num_local_master_experts, num_local_redundant_experts, *self._numels)
        told = self._group.gather_numbers(*sizes, max_microbatches, self._min_rows)
        check(len(set(told)) == 1, f"Manager: sizes differ between ranks: {told}")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        slots = num_local_redundant_experts

        def made(numel: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, numel, dtype=dtype, device=device)

        self.redundant_fc1_weights, self.redundant_fc2_weights = (
            made(numel, torch.bfloat16) for numel in self._numels
        )
        self.redundant_fc1_grads, self.redundant_fc2_grads = (
            made(numel, torch.float32) if is_train else None for numel in self._numels
        )
        self._pool: ExchangePool | None = ExchangePool(self._group)
        self._comm = CommStream()
        self._masters: dict[int, _Masters] = {}  # by layer
        self._planned: dict[tuple[int, int], PlannedBalance] = {}  # by layer and micro-batch
        self._slots: dict[int, int] = {}  # by layer, that of the micro-batch now

    def _settled(self, legacy_placement: bool) -> int:
        """Checks sizes; returns min_rows."""
        check_least("num_layers", self.num_layers)
        check_least("num_local_master_experts", self.num_local_master_experts)
        replicas = self.num_local_redundant_experts
        check(
            0 <= replicas <= _core.MOST_REPLICAS,
            f"num_local_redundant_experts = {replicas} (expected 0 to {_core.MOST_REPLICAS})",
        )
        for name, numel in zip(("expert_fc1_numel", "expert_fc2_numel"), self._numels):
            check_least(name, numel)
        check_least("max_microbatches", self.max_microbatches)
        if legacy_placement:
            raise NotInWeft("legacy_placement: Weft has one way to place replicas")
        name = "ULTRA_EP_QUOTA_MIN_TOKENS_PER_REPLICA"
        return environment.number(name, default=1024)

    def construct_local_master_ptr_pool(
        self,
        layer: int,
        fc1_weights: Sequence[Tensor],
        fc2_weights: Sequence[Tensor],
        fc1_grads: Sequence[Tensor] | None = None,
        fc2_grads: Sequence[Tensor] | None = None,
    ) -> None:
        """Local. Registers a layer's masters and, if is_train, their gradients: M tensors each,
        contiguous, of any shape with the manager's element counts, read and written in place."""
        with Call("construct_local_master_ptr_pool"):
            self._check_layer(layer)
            weights = (tuple(fc1_weights), tuple(fc2_weights))
            self._check_masters("weights", weights, torch.bfloat16)
            grads: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
            if self.is_train:
                grads = (tuple(fc1_grads or ()), tuple(fc2_grads or ()))
                self._check_masters("grads", grads, torch.float32)
            self._masters[layer] = _Masters(weights, grads)

    def allocate_microbatch_slot(self, layer: int) -> int:
        """Local. Begins a layer's next micro-batch, whose placement is kept beside those of the
        max_microbatches - 1 before. Returns the number for `microbatch_slot`."""
        with Call("allocate_microbatch_slot"):
            self._check_layer(layer)
            slot = (self._slots.get(layer, -1) + 1) % self.max_microbatches
            self._slots[layer] = slot
            self._planned.pop((layer, slot), None)
            return slot

    def update_placement(self, layer: int, routing_map: Tensor) -> PlannedBalance:
        """Collective. Plans a layer's replicas for the current micro-batch. routing_map: bool
        [T, experts] of this rank's tokens. The host waits for the counts. Returns the plan, the
        same on all ranks."""

        def count() -> Tensor:
            self._check_layer(layer)
            check_tensor("routing_map", routing_map, torch.bool, ["T", self.num_experts])
            return routing_map.sum(0)

        with Call("update_placement"):
            replicas = self.num_local_redundant_experts
            how = (replicas, self._min_rows, layer)
            planned = planned_by(self._group, "update_placement", count, *how)
            self._planned[layer, self._slots.setdefault(layer, 0)] = planned
            return planned

    def reroute(
        self, layer: int, probs: Tensor, routing_map: Tensor, microbatch_slot: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Local. Turns probs [T, experts] (differentiable) and the routing_map that was planned for
        into the same by physical experts, [T, ranks * (M + R)]."""
        with Call("reroute"):
            planned = self._planned_for(layer, microbatch_slot)
            check_tensor("routing_map", routing_map, torch.bool, ["T", self.num_experts])
            check_tensor("probs", probs, None, list(routing_map.shape))
            token, expert = routing_map.nonzero(as_tuple=True)
            there = planned.assign(self.rank, expert)
            logical = self._logical(planned).to(probs.device)
            rerouted = routing_map.new_zeros(len(routing_map), len(logical))
            rerouted[token, there] = True
            return torch.where(rerouted, probs[:, logical], 0), rerouted

    @without_gradients
    def reroute_sparse(
        self, layer: int, topk_ids: Tensor, microbatch_slot: int | None = None
    ) -> Tensor:
        """Local. Makes experts in topk_ids [T, K], int32 or int64, of the planned routing physical
        ones, in place; -1 stays. Returns topk_ids."""
        with Call("reroute_sparse"):
            planned = self._planned_for(layer, microbatch_slot)
            check_tensor("topk_ids", topk_ids, INTEGERS, ["T", "K"])
            return topk_ids.copy_(planned.assign(self.rank, topk_ids))

    @without_gradients
    def weight_sync(
        self,
        layer: int,
        previous_event: Any = None,
        async_finish: bool = False,
        microbatch_slot: int | None = None,
    ) -> EventOverlap:
        """Collective. Copies a layer's weights to its replicas' places; call it again before the
        backward if another layer has used the places. microbatch_slot: whose placement; None: the
        current micro-batch's. Returns an event with async_finish."""

        def move(masters: _Masters, planned: PlannedBalance, call: Call) -> None:
            slots = (self.redundant_fc1_weights, self.redundant_fc2_weights)
            own = [self._stacked(part) for part in masters.weights]
            put_weights(slots, own, *self._way(planned, call, "weight_sync", layer))

        return self._moved(
            "weight_sync", move, (layer, microbatch_slot), previous_event, async_finish
        )

    @without_gradients
    def grad_reduce(
        self,
        layer: int,
        previous_event: Any = None,
        async_finish: bool = False,
        microbatch_slot: int | None = None,
    ) -> EventOverlap:
        """Collective. Adds gradients of a layer's replicas to its masters': the master's, then by
        ascending rank. Replicas' gradients stay. Arguments and result: see `weight_sync`."""

        def move(masters: _Masters, planned: PlannedBalance, call: Call) -> None:
            check(self.is_train, "there are no gradients without is_train")
            slots = (self.redundant_fc1_grads, self.redundant_fc2_grads)
            own = [self._stacked(part) for part in masters.grads]
            add_gradients(slots, own, *self._way(planned, call, "grad_reduce", layer))
            for sums, part in zip(own, masters.grads):
                for total, grad in zip(sums, part):
                    grad.view(-1).copy_(total)

        return self._moved(
            "grad_reduce", move, (layer, microbatch_slot), previous_event, async_finish
        )

    def destroy(self) -> None:
        """Frees the memory; later calls are refused. AssertionError unless the manager was made
        with explicitly_destroy."""
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _moved(
        self,
        name: str,
        move: Callable[[_Masters, PlannedBalance, Call], None],
        whose: tuple[int, int | None],
        previous_event: Any,
        async_finish: bool,
    ) -> EventOverlap:
        with Call(name, self._pool, layout="rank_major", row_budget=0) as call:
            planned = self._planned_for(*whose)
            masters = self._masters.get(whose[0])
            check(masters is not None, f"layer {whose[0]} has no construct_local_master_ptr_pool")
            device = self.redundant_fc1_weights.device
            inputs = [one for part in (*masters.weights, *masters.grads) for one in part]
            with self._comm.call(device, inputs, previous_event, async_finish) as work:
                move(masters, planned, call)
        return event_of(work)

    def _way(self, planned: PlannedBalance, call: Call, name: str, layer: int) -> tuple:
        placement = planned.placement
        sends = sends_of(placement, self.num_local_master_experts, self.rank)
        return sends, carry_by(call, self.num_ranks, name, placement, 0, of=layer)

    def _planned_for(self, layer: int, microbatch_slot: int | None) -> PlannedBalance:
        self._check_layer(layer)
        slot = self._slots.get(layer, 0) if microbatch_slot is None else microbatch_slot
        planned = self._planned.get((layer, slot))
        check(planned is not None, f"layer {layer} has no update_placement for micro-batch {slot}")
        return planned

    def _logical(self, planned: PlannedBalance) -> Tensor:
        """Returns each place's expert, int64 [physical experts]; empty: 0."""
        masters = torch.arange(self.num_experts, device="cpu").view(self.num_ranks, -1)
        replicas = planned.placement.clamp(min=0)
        return torch.cat([masters, replicas], dim=1).flatten()

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([one.detach().view(-1) for one in tensors])

    def _check_layer(self, layer: int) -> None:
        check(self._pool is not None, "the manager was destroyed")
        check(
            0 <= layer < self.num_layers, f"layer = {layer} (expected 0 to {self.num_layers - 1})"
        )

    def _check_masters(
        self, name: str, parts: tuple[Sequence[Tensor], ...], dtype: torch.dtype
    ) -> None:
        masters = self.num_local_master_experts
        for fc, (tensors, numel) in enumerate(zip(parts, self._numels), start=1):
            found = [(one.numel(), one.dtype, one.is_contiguous()) for one in tensors]
            check(
                found == [(numel, dtype, True)] * masters,
                f"fc{fc}_{name} are (elements, dtype, is contiguous) {found} (expected {masters} "
                f"of {numel}, {dtype}, contiguous)",
            )
