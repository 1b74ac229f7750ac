# SPDX-License-Identifier: Apache-2.0
"""Layers of Qwen3-30B-A3B with synthetic weights, cut for the overlap of two micro-batches. The
results are the same bits each time. qwen3_run.py trains it."""

import importlib.util
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.config import OverlapModelConfig
from weft.dispatcher import DispatcherGroups
from weft.examples.layer import MoELayer, make_dispatcher
from weft.overlap import DelayedLinear, ModelChunk, TransformerLayer

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns t [B, S, heads, D] by its positions' cos and sin [S, D / 2]."""
    if t.is_cuda and _HAS_TRITON:
        from .qwen3_rotary_triton import Rotate

        return Rotate.apply(t, cos, sin)
    cos, sin = (table.to(t.dtype)[:, None] for table in (cos, sin))
    left, right = t.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


EPS = 1e-6
ROPE_BASE = 1e6


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults are those of Qwen3-30B-A3B."""

    layers: int = 48
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    topk: int = 8
    width: int = 768  # of an expert
    vocabulary: int = 151936
    sequence: int = 4096
    sequences: int = 2  # of a micro-batch


class Attention(nn.Module):
    """A norm and causal grouped-query attention. x [B, S, H] -> [B, S, H]."""

    def __init__(self, shape: Shape, delay: bool) -> None:
        super().__init__()
        dim, self.shape = shape.head_dim, shape
        self.norm = nn.RMSNorm(shape.hidden, eps=EPS)
        self.sizes = [n * dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        options = {"bias": False, "delay_wgrad_compute": delay}
        self.qkv = DelayedLinear(shape.hidden, sum(self.sizes), **options)
        self.out = DelayedLinear(self.sizes[0], shape.hidden, **options)
        self.q_norm = nn.RMSNorm(dim, eps=EPS)
        self.k_norm = nn.RMSNorm(dim, eps=EPS)
        # Angles are float: positions of a long sequence are no bf16 numbers.
        inverse = ROPE_BASE ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.arange(shape.sequence, dtype=torch.float32)[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in parts)
        cos, sin = (table[: x.shape[1]] for table in (self.cos, self.sin))
        q, k = (rotate(t, cos, sin) for t in (self.q_norm(q), self.k_norm(k)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Does causal attention, with the same bits each time, also in backward."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if out.grad_fn is not None and "Flash" in out.grad_fn.name() and out.is_cuda:
        # This backward adds up gradients in any order unless told not to. It is told so for its
        # own time only: other operations would become slower, those of a dispatcher too.
        out.grad_fn.register_prehook(lambda _: _fix_order(True))
        out.grad_fn.register_hook(lambda *_: _fix_order(False))
    return out


def _fix_order(wanted: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, changes nothing here
    torch.use_deterministic_algorithms(wanted)  # with warn_only, flash attention does not obey


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
        replicas: int | None = None,
    ) -> None:
        made = make_dispatcher(
            dispatcher_name, groups, shape.experts, shape.topk, num_sms, capacity, replicas
        )
        sizes = (shape.hidden, shape.width, shape.experts, shape.topk)
        super().__init__(made, *sizes, delay, replicas is not None)
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
    replicas: int | None = None,
) -> ModelChunk:
    """Builds the model with torch's default device and type; `fill` sets its weights.

    num_sms, capacity, replicas: see `make_dispatcher`. balance: a seed of this rank, see `QwenMoE`.
    """

    def layer(index: int) -> TransformerLayer:
        seed = None if balance is None else balance + index
        moe = QwenMoE(dispatcher, groups, shape, delay, num_sms, seed, capacity, replicas)
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
    """Other weights are on all ranks."""
    return ".experts." in name


@torch.no_grad()
def fill(model: ModelChunk, seed: int) -> None:
    """Sets the same weights in every mode, and for an expert wherever it lives; norms stay at 1."""
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
