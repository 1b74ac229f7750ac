# SPDX-License-Identifier: Apache-2.0
"""MoonEP's buffer: every call of `dispatch` gives all ranks about as many rows, by slots for copies
of other ranks' experts.

    rows, route_weights, cu_seqlens, plan = buffer.dispatch(x, weights, ids, counts)
    buffer.prefetch_weight(plan=plan, full_gate_weight=w1, full_up_weight=w3, full_down_weight=w2)
    x, _, _ = buffer.combine(plan=plan, hidden_nvsh=...)

A rank's groups of rows are those of its own E / R experts, then those of its B slots. Results carry
no gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group, Plan, _core
from weft.compat.deep_ep.checks import INTEGERS, MAX_TOPK, check, check_least, check_tensor
from weft.compat.deep_ep.ep.balance import carry_by, check_weights
from weft.compat.deep_ep.payload import round_up
from weft.compat.deep_ep.runtime import Call, ExchangePool, without_gradients
from weft.compat.exact_load import planned_by
from weft.copies import put_weights, sends_of
from weft.planner import PlannedBalance

__all__ = ["Buffer", "BufferPlan"]


class BufferPlan:
    """Plan that `dispatch` returns for the calls after it. experts_to_copy int32 [ranks, B]: the
    expert in each slot, -1: none."""

    def __init__(self, plan: Plan, planned: PlannedBalance) -> None:
        self.plan = plan
        self.experts_to_copy = planned.placement


class Buffer:
    """Ranks that each have at most S tokens of H elements with K of E experts, and B slots for
    copies of experts.

    Collective; arguments are the same on all ranks. num_ep_ranks: of the group. num_sms: GPU
    multiprocessors of a call, 0: by Weft's table. token_padding: multiple of every group's rows. B:
    None for E / ranks, at most 16. explicitly_destroy: `destroy()` will be called. Calls raise
    InvalidArgument (also an AssertionError).
    """

    def __init__(
        self,
        S: int,  # noqa: N803  (names of the interface)
        H: int,  # noqa: N803
        K: int,  # noqa: N803
        E: int,  # noqa: N803
        num_ep_ranks: int,
        num_sms: int = 0,
        token_padding: int = 1,
        B: int | None = None,  # noqa: N803
        group: dist.ProcessGroup | None = None,
        explicitly_destroy: bool = False,
    ) -> None:
        self._group = Group.of(group)
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        self.explicitly_destroy = explicitly_destroy
        self.S, self.H, self.K, self.E = S, H, K, E
        self.num_sms, self.token_padding = num_sms, token_padding

        def settle() -> int:
            check(
                num_ep_ranks == self.num_ranks,
                f"num_ep_ranks = {num_ep_ranks} of a group of {self.num_ranks}",
            )
            for name, value in (("S", S), ("H", H), ("K", K), ("token_padding", token_padding)):
                check_least(name, value)
            check(K <= MAX_TOPK, f"K = {K} (expected at most {MAX_TOPK})")
            check(
                E >= 1 and E % self.num_ranks == 0,
                f"E = {E} (expected a multiple of {self.num_ranks} ranks)",
            )
            slots = min(E // self.num_ranks, _core.MOST_REPLICAS) if B is None else B
            check(
                0 <= slots <= _core.MOST_REPLICAS,
                f"B = {slots} (expected 0 to {_core.MOST_REPLICAS})",
            )
            check_least("num_sms", num_sms, 0)
            return slots

        self.B = self._group.agreed("Buffer", settle)
        told = self._group.gather_numbers(S, H, K, E, self.B, token_padding)
        check(
            len(set(told)) == 1,
            f"Buffer: (S, H, K, E, B, token_padding) differ between ranks: {told}",
        )
        self.num_local = E // self.num_ranks
        # Rows of a call unless its busiest rank has more.
        self.NvS = round_up(S * K + (token_padding - 1) * 2 * self.num_local, token_padding)
        self._pool: ExchangePool | None = ExchangePool(self._group)
        self._copies = ExchangePool(self._group)

    @without_gradients
    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, BufferPlan]:
        """Collective. Sends x bf16 [T, H], T at most S; weights fp32 [T, K]; ids int32 or int64
        [T, K], -1: no expert. counts [E] is unused: ids are counted. The host waits for the counts.

        Returns rows [NvS, H] by group, padding and the rest zero; the weights of their routes fp32
        [NvS]; int32 [E / ranks + B + 1], where each group begins, and the last one ends; the plan.
        A rank that gets more than NvS rows returns more.
        """
        self._alive("dispatch")
        planned = self._planned(x, weights, ids)
        there = planned.assign(self.rank, ids)
        sizes = planned.quotas.sum(0).view(self.num_ranks, -1)[self.rank].tolist()
        padded = [0, *(round_up(size, self.token_padding) for size in sizes)]
        ends = torch.tensor(padded, device="cpu").cumsum(0)
        options = {
            "layout": "expert_major",
            "pad_multiple": self.token_padding,
            "row_budget": max(self.NvS, int(ends[-1])),
        }
        with Call("dispatch", self._pool) as call:
            key = (self.H, self.num_ranks * (self.num_local + self.B), x.device)
            exchange = call.plans(key, self.S, self.K, **options)
            num_sms = self.num_sms if x.is_cuda else 0
            plan, out = exchange.plan_and_dispatch(there, x, weights, num_sms=num_sms, **options)
        out.rows[int(ends[-1]) :] = 0
        out.weights[int(ends[-1]) :] = 0
        cu_seqlens = ends.to(x.device, torch.int32)
        return out.rows, out.weights[:, 0], cu_seqlens, BufferPlan(plan, planned)

    @without_gradients
    def prefetch_weight(
        self,
        *,
        plan: BufferPlan,
        full_gate_weight: Tensor,
        full_up_weight: Tensor,
        full_down_weight: Tensor,
    ) -> None:
        """Collective. Fills slots with the weights of the experts to copy. Each tensor
        [E / ranks + B, ...], of any dtype, contiguous: this rank's experts, then its slots; empty
        slots are left as they are."""
        self._alive("prefetch_weight")
        full = (full_gate_weight, full_up_weight, full_down_weight)
        with Call("prefetch_weight", self._copies, layout="rank_major", row_budget=0) as call:
            _check_plan(plan)
            for name, one in zip(("full_gate_weight", "full_up_weight", "full_down_weight"), full):
                is_whole = isinstance(one, Tensor) and one.size(0) == self.num_local + self.B
                check(is_whole, f"{name} is not a tensor of {self.num_local + self.B} experts")
            own = tuple(one[: self.num_local] for one in full)
            slots = tuple(one[self.num_local :] for one in full)
            check_weights(slots, own, self.B)
            sends = sends_of(plan.experts_to_copy, self.num_local, self.rank)
            how = ("prefetch_weight", plan.experts_to_copy, self.num_sms)
            put_weights(slots, own, sends, carry_by(call, self.num_ranks, *how))

    @without_gradients
    def combine(
        self, *, plan: BufferPlan, hidden_nvsh: Tensor, route_weights_nvs: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        """Collective. Sums rows [NvS, H], in `dispatch`'s order, unweighted into tokens. Returns
        [T, H]; route_weights_nvs fp32 [NvS] at their routes, [T, K], or None; and None."""
        self._alive("combine")
        with Call("combine", self._pool, "combine") as call:
            _check_plan(plan)
            made = call.by(plan.plan)
            check_tensor("hidden_nvsh", hidden_nvsh, None, [made.num_rows, self.H])
            if route_weights_nvs is not None:
                check_tensor("route_weights_nvs", route_weights_nvs, torch.float32, [made.num_rows])
                route_weights_nvs = route_weights_nvs.view(-1, 1)
            num_sms = self.num_sms if hidden_nvsh.is_cuda else 0
            back = call.exchange.combine(made, hidden_nvsh, route_weights_nvs, num_sms=num_sms)
        return back.x, back.weights, None

    def destroy(self) -> None:
        """Frees the memory; later calls are refused. AssertionError unless the buffer was made with
        explicitly_destroy."""
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        if self._pool is not None:
            self._pool.close()
            self._copies.close()
        self._pool = None

    def _alive(self, name: str) -> None:
        check(self._pool is not None, f"{name}: the buffer was destroyed")

    def _planned(self, x: Any, weights: Any, ids: Any) -> PlannedBalance:
        """Collective. Checks a dispatch; plans by exact counts."""

        def count() -> Tensor:
            check_tensor("x", x, torch.bfloat16, ["T", self.H])
            check(len(x) <= self.S, f"x has {len(x)} tokens (expected at most S = {self.S})")
            check_tensor("ids", ids, INTEGERS, [len(x), self.K])
            check_tensor("weights", weights, torch.float32, [len(x), self.K])
            is_inside = (ids >= -1) & (ids < self.E)  # or counts would take any memory
            check(bool(is_inside.all()), f"ids has experts outside -1 to {self.E - 1}")
            return ids[ids >= 0].long().bincount(minlength=self.E)

        return planned_by(self._group, "dispatch", count, self.B)


def _check_plan(plan: Any) -> None:
    check(
        isinstance(plan, BufferPlan),
        f"plan is a {type(plan).__name__} (expected that of `dispatch`)",
    )
