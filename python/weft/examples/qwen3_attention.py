# SPDX-License-Identifier: Apache-2.0
"""The sizes of Qwen3-30B-A3B and its attention, whose results are the same bits each time."""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.overlap import DelayedLinear

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t [B, S, heads, D] by the angles of its positions, cos and sin [S, D / 2]."""
    if t.is_cuda and _HAS_TRITON:
        return _Rotate.apply(t, cos, sin)
    cos, sin = (table.to(t.dtype)[:, None] for table in (cos, sin))
    left, right = t.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class _Rotate(torch.autograd.Function):
    """In fp32, rounded once. The gradient is turned back."""

    @staticmethod
    def forward(ctx, t, cos, sin):  # noqa: ANN001, ANN205
        from .qwen3_rotary_triton import turn

        ctx.save_for_backward(cos, sin)
        return turn(t.contiguous(), cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        from .qwen3_rotary_triton import turn

        return turn(grad.contiguous(), *ctx.saved_tensors, -1), None, None


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
        # In float: positions of a long sequence are no bf16 numbers.
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
    """Causal attention with the same bits each time, backward included."""
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
