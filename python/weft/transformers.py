# SPDX-License-Identifier: Apache-2.0
"""Weft as an expert-parallel backend of Hugging Face's Transformers, 5.23 and later.

    weft.transformers.register()
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="weft")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

Transformers shards, loads and saves the experts as it does for its own implementations, and wraps
FSDP2 around them. Weft takes each token to its experts and back (docs/transformers.md).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    text = f"weft.transformers needs transformers 5.23 or later ({error})"
    raise ImportError(text, name="transformers") from error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def register(name: str = "weft") -> None:
    """Lets `DistributedConfig(ep_implementation=name)` mean Weft from now on, in this process."""
    EPImplementationInterface.register(name, WeftEP)


class WeftEP(EPImplementation):
    """Takes a layer's tokens to the experts of all ranks and back; differentiable.

    Layers with the same group, hidden size, experts and device share one exchange, which grows
    with the largest call and lives as long as the group.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.exchange: weft.Exchange | None = None  # of the last call

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Collective. hidden_states [T, hidden] bf16, fp16 or fp32, top_k_index int64 [T, K],
        experts of all ranks, top_k_weights [T, K]; T may differ between the ranks of ep_mesh and
        be 0. Returns the weighted sums of the experts' outputs, [T, hidden].
        Raises InvalidArgument on every rank if one rank's arguments are wrong, TimeoutError,
        PeerError."""
        num_tokens = hidden_states.size(0)
        x, topk_idx, weights = map(self._own_part, (hidden_states, top_k_index, top_k_weights))
        self.exchange = self._exchange_for(x)
        plan, sent = weft.plan_and_dispatch(self.exchange, topk_idx, x, weights.float())
        combined = weft.combine(plan, self._computed(plan, sent, weights.dtype)).x
        return self._of_all_parts(combined, num_tokens)

    def _computed(self, plan: weft.Plan, sent: weft.Dispatched, dtype: torch.dtype) -> Tensor:
        """Computes this rank's experts: [plan.num_rows, hidden]."""
        rows, weights = sent.rows, sent.weights.to(dtype)
        experts = torch.arange(self.num_local_experts, device=rows.device)
        ids = experts.repeat_interleave(plan.rows_per_expert, output_size=plan.num_rows)
        if plan.num_rows > 0:
            return self.experts_forward(rows, ids.unsqueeze(1), weights)
        # Parameters need gradients on a rank without rows, too: FSDP reduces them on all ranks.
        one = rows.new_zeros((1, rows.size(1)))
        made = self.experts_forward(one, ids.new_zeros((1, 1)), weights.new_zeros((1, 1)))
        return rows + made[:0]

    def _exchange_for(self, x: Tensor) -> weft.Exchange:
        group, hidden = self.ep_mesh.get_group(), x.size(1)
        num_experts = self.num_local_experts * self.ep_mesh.size()
        exchanges, key = _EXCHANGES.setdefault(group, {}), (hidden, num_experts, x.device)
        if key not in exchanges:
            exchanges[key] = weft.Exchange(
                group, hidden=hidden, num_experts=num_experts, device=x.device
            )
        return exchanges[key]

    # --- where tp_mesh has several ranks with the same tokens, each sends its part of them ---

    def _own_part(self, tensor: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return tensor
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _of_all_parts(self, part: Tensor, num_tokens: int) -> Tensor:
        if self.tp_mesh.size() == 1:
            return part
        hidden = part.size(1)
        parts = DTensor.from_local(
            part, self.tp_mesh, [Shard(0)], shape=(num_tokens, hidden), stride=(hidden, 1)
        )
        return parts.full_tensor()


# Exchanges of a group by hidden size, experts and device. They outlive the layers, which ranks may
# free at different times: ranks must agree whether a call makes a new exchange.
_EXCHANGES: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, int, torch.device], weft.Exchange]
] = weakref.WeakKeyDictionary()
