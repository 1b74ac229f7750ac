# SPDX-License-Identifier: Apache-2.0
"""Layers of Qwen3-30B-A3B with synthetic weights, cut for the overlap of two micro-batches.
qwen3_run.py trains it."""

import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.config import OverlapModelConfig
from weft.dispatcher import DispatcherGroups
from weft.examples.layer import MoELayer, make_dispatcher
from weft.examples.qwen3_attention import EPS, Attention, Shape
from weft.overlap import DelayedExperts, DelayedLinear, ModelChunk, TransformerLayer


class QwenMoE(MoELayer):
    """The router's probabilities sum to 1 over the chosen experts.

    balance: a seed; experts are then chosen at random, whatever the router says, as many benchmarks
    do: synthetic weights know no loss that would keep the experts equally busy.
    """

    balance: int | None = None
    loads: list[Tensor] | None = None  # [experts] routes of each call, while it is a list
    _generator: torch.Generator | None = None

    def __init__(
        self,
        dispatcher_name: str,
        groups: DispatcherGroups,
        shape: Shape,
        delay: bool,
        num_sms: int | None = None,
        balance: int | None = None,
        capacity: float | None = None,
    ) -> None:
        made = make_dispatcher(
            dispatcher_name, groups, shape.experts, shape.topk, num_sms, capacity
        )
        super().__init__(made, shape.hidden, shape.width, shape.experts, shape.topk)
        self.router = DelayedLinear(
            shape.hidden, shape.experts, bias=False, delay_wgrad_compute=delay
        )
        self.experts = DelayedExperts(
            made.num_local_experts, shape.hidden, shape.width, delay_wgrad_compute=delay
        )

        self.balance = balance

    def choose(self, scores: Tensor) -> Tensor:
        if self.balance is None:
            return super().choose(scores)
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self.balance)
        keys = torch.rand(scores.shape, generator=self._generator, device=scores.device)
        return keys.topk(self.topk, dim=-1).indices

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing_map, probs = super().route(x)
        if self.loads is not None:
            self.loads.append(routing_map.sum(dim=0))
        return routing_map, probs / probs.sum(dim=-1, keepdim=True)


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.tokens(input_ids)


class Loss(nn.Module):
    """The mean cross entropy of the next token."""

    def __init__(self, shape: Shape, delay: bool) -> None:
        super().__init__()
        self.project = DelayedLinear(
            shape.hidden, shape.vocabulary, bias=False, delay_wgrad_compute=delay
        )

    def forward(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        logits = self.project(hidden).flatten(0, -2).float()
        return functional.cross_entropy(logits, labels.flatten())


def build(
    shape: Shape,
    dispatcher: str,
    groups: DispatcherGroups,
    *,
    delay: bool = False,
    high_priority: bool = False,
    num_sms: int | None = None,
    balance: int | None = None,
    capacity: float | None = None,
) -> ModelChunk:
    """The model, with torch's default device and type. Its weights are left to `fill`.

    num_sms, capacity: see `make_dispatcher`. balance: a seed of this rank, see `QwenMoE`.
    """

    def layer(index: int) -> TransformerLayer:
        seed = None if balance is None else balance + index
        moe = QwenMoE(dispatcher, groups, shape, delay, num_sms, seed, capacity)
        norm = nn.RMSNorm(shape.hidden, eps=EPS)
        return TransformerLayer(Attention(shape, delay), moe=moe, pre_mlp_norm=norm)

    return ModelChunk(
        [layer(i) for i in range(shape.layers)],
        embedding=Embedding(shape),
        output_layer=Loss(shape, delay),
        final_norm=nn.RMSNorm(shape.hidden, eps=EPS),
        config=OverlapModelConfig(
            delay_wgrad_compute=delay, high_priority_a2a_comm_stream=high_priority
        ),
    )


def is_expert_weight(name: str) -> bool:
    """Every other weight is on all ranks."""
    return ".experts." in name


@torch.no_grad()
def fill(model: ModelChunk, seed: int) -> None:
    """The same weights in every mode, and for an expert wherever it lives; norms stay at 1."""
    first = model.layers[0].dispatcher.local_expert_indices[0]
    generator = None
    for name, weights in model.named_parameters():
        if weights.dim() == 1:
            continue
        if generator is None:
            generator = torch.Generator(weights.device)
        parts = weights if is_expert_weight(name) else [weights]
        for i, part in enumerate(parts):
            key = f"{name} {first + i}" if is_expert_weight(name) else name
            generator.manual_seed(seed + zlib.crc32(key.encode()))
            part.normal_(0.0, 0.02, generator=generator)
