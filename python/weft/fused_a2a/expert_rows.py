# SPDX-License-Identifier: Apache-2.0
"""Rows by expert in one step, for callers who would permute the rows of the fused functions.

What a permute behind `fused_dispatch` gives, and an unpermute before `fused_combine` takes, bit for
bit: rows ascending by local expert, source rank, token. But every row is written once, to its final
place, and the sums over a rank's experts are made on the way back; neither exists as a pass of its
own, forward or backward. It runs on the exchanges of the same buffer, on the current stream.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import Plan
from weft.compat.deep_ep.checks import FLOATS, check_routing, check_tensor
from weft.compat.deep_ep.layout import routes_of
from weft.compat.deep_ep.runtime import MIN_TOKENS, MIN_TOPK

from .buffers import refusing
from .rank_rows import DEEPEP, UCCL, Functions


class ExpertRows(NamedTuple):
    """What the combine of a dispatch needs. It holds no tensor of the caller."""

    plan: Plan
    num_sms: int

    @property
    def local_experts(self) -> Tensor:
        """int64 [P, 1] on the plan's device: the local expert of each row, -1 for padding."""
        plan = self.plan
        row = torch.arange(plan.num_rows, device=plan.exchange.device)
        end = plan.expert_begin + plan.padded_rows_per_expert
        expert = torch.searchsorted(end, row, right=True)
        is_padding = row >= (plan.expert_begin + plan.rows_per_expert)[expert]
        return expert.masked_fill(is_padding, -1).unsqueeze(1)


class ByExpert(NamedTuple):
    """The calls on the buffers of one library, in place of its fused functions."""

    functions: Functions

    @property
    def replaces(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return self.functions.dispatch, self.functions.combine

    def dispatch(
        self,
        x: Tensor,
        token_indices: Tensor,
        token_probs: Tensor,
        num_experts: int,
        group: dist.ProcessGroup,
        pad_multiple: int = 1,
        num_sms: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, ExpertRows]:
        """Collective. It takes the arguments of `fused_dispatch`; x bf16, fp16 or fp32 [T, H].

        pad_multiple: zero rows of probability 0 fill each expert's rows up to a multiple of it.
        num_sms: GPU multiprocessors of each exchange, forward and backward; 0: by Weft's table.
        Returns rows [P, H]; their probabilities fp32 [P, 1]; rows per local expert, padding
        included, int64 [El] on the CPU; and the handle for `combine`. Differentiable in `x` and
        `token_probs`; no input is kept for backward. Waits once for a GPU, to learn P.
        Raises what the exchange does: InvalidArgument, TimeoutError, PeerError.
        """
        buffer, _ = self.functions.library.begin(x, group, (False, False))
        with refusing("dispatch", buffer) as call:
            buffer._runtime()  # while it has one
            check_tensor("x", x, FLOATS, ["T", "H"])
            check_routing(token_indices, token_probs, x.size(0))
            topk = max(MIN_TOPK, token_indices.size(1))
            exchange = call.plans((x.size(1), num_experts, x.device), MIN_TOKENS, topk)
            num_sms = num_sms if x.is_cuda else 0
            routes = routes_of(token_indices, num_experts)
            plan, out = weft.plan_and_dispatch(
                exchange, routes, x, token_probs, pad_multiple=pad_multiple, num_sms=num_sms
            )
        # This comes after the launch: a GPU has nothing to do between the wait and that.
        counts = plan.padded_rows_per_expert_list
        counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        return out.rows, out.weights, counts, ExpertRows(plan, num_sms)

    def combine(self, rows: Tensor, handle: ExpertRows) -> Tensor:
        """Collective. Rows [P, H] of the dispatch that made `handle` -> tokens [T, H].

        The sum of a token's rows on each rank in fp32, rounded, then over the ranks; unweighted,
        padding rows count for nothing. Differentiable in `rows`, which is not kept for backward.
        """
        return weft.combine(handle.plan, rows, num_sms=handle.num_sms).x


DEEPEP_BY_EXPERT, UCCL_BY_EXPERT = ByExpert(DEEPEP), ByExpert(UCCL)
