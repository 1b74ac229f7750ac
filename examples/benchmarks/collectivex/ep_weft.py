# SPDX-License-Identifier: Apache-2.0
"""Weft as a backend of CollectiveX, a benchmark of expert-parallel libraries: copy this file beside
its `ep_backend.py` (README.md in the folder above).

"normal" is `weft.Exchange` with a row for each rank that a token goes to, whose sums are those of
the ranks, unweighted. "low-latency" is the same exchange by blocks of fixed size for each expert,
through the calls of `deep_ep`, weighted where the tokens are. Rows are bf16 in both.
"""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
from ep_backend import EPBackend

import weft
from weft.compat.deep_ep import Buffer

MOST_DECODED = 512  # tokens of a rank in a low-latency call


class WeftBackend(EPBackend):
    name = "weft"
    maturity = "candidate"
    kernel_generation = "weft"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16",)

    def __init__(self, args, rank, world_size, local_rank, device):
        super().__init__(args, rank, world_size, local_rank, device)
        self.group = dist.group.WORLD
        self.local = args.experts // world_size
        self.is_decode = self.mode == "low-latency"
        if self.is_decode:
            self.kernel_generation = "weft-low-latency"
            self.combine_weight_semantics = "weighted-kernel-sum"

    def buffer_cap(self, args):
        return MOST_DECODED if self.is_decode else None

    def create_buffer(self, spec):
        self.most = spec.max_tokens_per_rank
        if self.is_decode:
            self.buffer = Buffer(
                self.group, low_latency_mode=True, num_qps_per_rank=self.local, explicitly_destroy=True
            )
            return
        self.exchange = weft.Exchange(
            self.group,
            hidden=spec.hidden,
            num_experts=spec.experts,
            max_tokens=self.most,
            max_topk=spec.topk,
            device=self.device,
        )

    def dispatch(self, problem):
        if self.is_decode:
            rows, counts, handle, *_ = self.buffer.low_latency_dispatch(
                problem.dispatch_x, problem.topk_idx, self.most, self.args.experts, use_fp8=False
            )
            return types.SimpleNamespace(rows=rows, counts=counts, handle=handle)
        plan, out, experts = self.exchange.plan_and_dispatch(
            problem.topk_idx,
            problem.dispatch_x,
            problem.topk_weights,
            layout="rank_major",
            pad_multiple=1,
            experts=True,
        )
        return types.SimpleNamespace(rows=out.rows, weights=out.weights, experts=experts, plan=plan)

    def stage(self, problem, handle):
        """Nothing: rows go back as they have come."""
        handle.given = handle.rows

    def combine(self, problem, handle):
        return self._combined(problem, handle, handle.given)

    def _combined(self, problem, handle, rows):
        if self.is_decode:
            return self.buffer.low_latency_combine(
                rows, problem.topk_idx, problem.topk_weights, handle.handle
            )[0]
        return self.exchange.combine(handle.plan, rows).x

    def recv_tokens(self, handle):
        return int(handle.counts.sum()) if self.is_decode else handle.plan.num_rows

    def inspect_dispatch(self, problem, handle):
        first = self.rank * self.local
        if self.is_decode:
            slots = torch.arange(handle.rows.size(1), device=handle.rows.device)
            handle.places = (slots < handle.counts.unsqueeze(1)).nonzero(as_tuple=True)
            return types.SimpleNamespace(
                payload=handle.rows[handle.places],
                expert_ids=first + handle.places[0],
                local_expert_counts=handle.counts.long(),
            )
        is_here = handle.experts >= 0
        return types.SimpleNamespace(
            payload=handle.rows,
            expert_ids=torch.where(is_here, handle.experts + first, -1),
            weights=handle.weights.float(),
            local_expert_counts=handle.experts[is_here].bincount(minlength=self.local),
        )

    def combine_transformed(self, problem, handle, transformed):
        rows = torch.zeros_like(handle.rows)
        if self.is_decode:
            rows[handle.places] = transformed.to(rows.dtype)
        else:
            rows.copy_(transformed)
        return self._combined(problem, handle, rows)

    def finalize(self, rc):
        if self.is_decode:
            self.buffer.destroy()
        else:
            self.exchange.close()
        return super().finalize(rc)
