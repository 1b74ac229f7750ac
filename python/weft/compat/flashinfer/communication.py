# SPDX-License-Identifier: Apache-2.0
"""Base of the communication back end that `register` makes.

Rows arrive one for each token on a rank, by source rank and token; those that carry no token
follow, whose ids are all `params.invalid_expert_id`. A weight whose expert is another rank's is 0.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group, Plan
from weft.compat.deep_ep.checks import (
    INTEGERS,
    check,
    check_optional,
    check_tensor,
)
from weft.compat.deep_ep.payload import Payload, numbers, parts_of, received_numbers
from weft.compat.deep_ep.runtime import Call, ExchangePool, without_gradients


class Communication:
    """`result_class` is FlashInfer's `MoEEpDispatchResult`."""

    supports_cuda_graph = True
    result_class: Any

    def __init__(self, bootstrap: Any, params: Any, *, config: Any = None) -> None:
        """Collective at a group's first call. The group is bootstrap.process_group, or the default
        one. config has no effect."""
        del config
        super().__init__(bootstrap, params)
        group = getattr(bootstrap, "process_group", None) or dist.group.WORLD
        self._pool = ExchangePool(Group.of(group))
        self._plan: Plan | None = None  # of a dispatch whose combine is to come

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Returns True, on CPUs too."""
        return True

    @without_gradients
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        max_tokens_per_rank: int | None = None,
    ) -> Any:
        """Collective. Sends tokens to their experts' ranks, without a wait for a GPU.

        hidden_states [T, any], with hidden_states_scale [T, any] of any type, rows of one byte an
        element. topk_ids int32 or int64 [T, K], global; no expert: params.invalid_expert_id, or a
        negative one. topk_weights fp32 [T, K] or None. runtime_max_tokens_per_rank, the same on
        all ranks: from 1 to the parameters' max_tokens_per_rank, for which None stands; FlashInfer
        has called it max_tokens_per_rank before 0.7.4. eplb_local_stats has no effect. Raises
        InvalidArgument (also a ValueError).
        """
        del eplb_local_stats
        params, ranks = self.params, self._pool.group
        capacity, name = params.max_tokens_per_rank, "runtime_max_tokens_per_rank"
        if runtime_max_tokens_per_rank is None and max_tokens_per_rank is not None:
            runtime_max_tokens_per_rank, name = max_tokens_per_rank, "max_tokens_per_rank"
        most = capacity if runtime_max_tokens_per_rank is None else runtime_max_tokens_per_rank
        wants = {"layout": "rank_major", "row_budget": ranks.num_ranks * most}
        with Call("dispatch", self._pool, **wants) as call:
            check(1 <= most <= capacity, f"{name} = {most} (expected 1 to {capacity})")
            check(self._plan is None, "a dispatch before the combine of the last one")
            has_scale = hidden_states_scale is not None
            x = (hidden_states, hidden_states_scale) if has_scale else hidden_states
            payload = Payload(x, scales=None, name="hidden_states")
            check_tensor("topk_ids", topk_ids, INTEGERS, [payload.num_tokens, "K"])
            check_optional("topk_weights", topk_weights, torch.float32, topk_ids.shape)
            check(
                payload.num_tokens <= most,
                f"hidden_states has {payload.num_tokens} tokens (at most {most})",
            )
            key = (params.hidden_size, params.num_experts, payload.device)
            call.plans(key, most, topk_ids.size(1), **wants)
            is_none = (topk_ids < 0) | (topk_ids == params.invalid_expert_id)
            ids = torch.where(is_none, -1, topk_ids)
            out = payload.send(call, ids, topk_weights, (numbers(ids),))
            ids = received_numbers(out.plan, out.beside[0])
            ids = torch.where(ids < 0, params.invalid_expert_id, ids).to(topk_ids.dtype)
            self._plan = out.plan
        rows, *scale = parts_of(out.x)
        return self.result_class(
            hidden_states=rows,
            topk_ids=ids,
            topk_weights=out.weights,
            tokens_per_rank=most,
            hidden_states_scale=scale[0] if scale else None,
        )

    @without_gradients
    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Collective. expert_output [rows of the dispatch, H], or [ranks, rows of each, H], bf16,
        fp16 or fp32, added up over ranks into [T, H], in the memory of output if it is given."""
        with Call("combine", self._pool, "combine") as call:
            check(self._plan is not None, "a combine without a dispatch")
            plan, self._plan = self._plan, None
            call.by(plan)
            check(isinstance(expert_output, Tensor), "expert_output is not a tensor")
            rows = expert_output.flatten(0, -2)
            check_tensor("expert_output", rows, None, [plan.num_rows, plan.exchange.hidden])
            size = [plan.num_tokens, plan.exchange.hidden]
            check_optional("output", output, expert_output.dtype, size)
            is_whole = output is None or output.is_contiguous()
            combined = call.exchange.combine(plan, rows, out=output if is_whole else None).x
        return combined if is_whole else output.copy_(combined)

    def destroy(self) -> None:
        """Frees the memory; a later call allocates anew."""
        self._plan = None
        self._pool.close()
