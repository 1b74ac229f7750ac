# SPDX-License-Identifier: Apache-2.0
"""Inputs, and one MoE layer for every family of fused functions beside a plain one in float64."""

import torch
import torch.distributed as dist

import weft.fused_a2a as fa

HIDDEN = 32
ROW_FAMILIES = ("deepep", "uccl", "deepepv2")
FAMILIES = (*ROW_FAMILIES, "hybridep")
PAD = 4  # of hybridep's groups
MAX_TOKENS = 64  # that deepepv2 is told


def reset():
    """No buffer of an earlier test, whose process group may be gone."""
    fa.free_buffer()
    fa.reset_hybrid_ep_buffer()
    fa._uccl_buffer = fa._elastic_buffer = None


def inputs(rank, num_tokens, topk, num_experts, dtype=torch.bfloat16, seed=0):
    """x, indices (distinct in a token, a fifth of them -1) and probabilities (0 there)."""
    gen = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=gen).to(dtype)
    idx = torch.rand(num_tokens, num_experts, generator=gen).argsort(1)[:, :topk].contiguous()
    idx[torch.rand(num_tokens, topk, generator=gen) < 0.2] = -1
    probs = torch.rand(num_tokens, topk, generator=gen) + 0.1
    return x, idx, torch.where(idx >= 0, probs, 0.0)


def expert_weights(num_experts):
    gen = torch.Generator().manual_seed(7)
    return torch.randn(num_experts, HIDDEN, HIDDEN, generator=gen) / HIDDEN**0.5


def to_dense(idx, probs, num_experts):
    """bool [T, E] and fp32 [T, E], differentiable in probs."""
    columns = torch.where(idx >= 0, idx, num_experts)
    routing_map = torch.zeros(idx.size(0), num_experts + 1, dtype=torch.bool)
    routing_map.scatter_(1, columns, True)
    dense = torch.zeros(idx.size(0), num_experts + 1).scatter_add(1, columns, probs)
    return routing_map[:, :-1].contiguous(), dense[:, :-1].contiguous()


def dispatch_rows(family, group, x, idx, probs, num_experts, **flags):
    if family == "deepepv2":
        buffer = fa.get_elastic_buffer(group, MAX_TOKENS, x.size(1), idx.size(1))
        return fa.deepepv2_dispatch(buffer, x, idx, probs, num_experts, MAX_TOKENS, **flags)
    dispatch = {"deepep": fa.fused_dispatch, "uccl": fa.uccl_fused_dispatch}[family]
    return dispatch(x, idx, probs, num_experts, group, **flags)


def combine_rows(family, group, rows, handle, **flags):
    if family == "deepepv2":
        buffer = fa.get_elastic_buffer(group, MAX_TOKENS, rows.size(1), 1)
        return fa.deepepv2_combine(buffer, rows, handle, **flags)
    combine = {"deepep": fa.fused_combine, "uccl": fa.uccl_fused_combine}[family]
    return combine(rows, group, handle, **flags)


def moe(family, group, x, idx, probs, weights, on_rows=lambda rows: rows, **flags):
    """[T, H] of x's dtype: each token through its experts, times its probabilities.

    `on_rows` sees what is passed to combine.
    """
    num_experts = weights.size(0)
    local = num_experts // dist.get_world_size(group)
    own = weights[dist.get_rank(group) * local :][:local]
    if family == "hybridep":
        routing_map, dense = to_dense(idx, probs, num_experts)
        rows, row_probs, _, counts, handle = fa.hybrid_ep_dispatch(
            x, routing_map, dense, group, local, pad_multiple=PAD, **flags
        )
        blocks = torch.split(rows.float(), counts.tolist())
        out = torch.cat([torch.tanh(block @ w) for block, w in zip(blocks, own)])
        out = on_rows((out * row_probs.unsqueeze(1)).to(x.dtype))
        return fa.hybrid_ep_combine(out, handle, counts.sum(), PAD, **flags)
    rows, row_idx, row_probs, _, handle = dispatch_rows(
        family, group, x, idx, probs, num_experts, **flags
    )
    out = torch.zeros_like(rows, dtype=torch.float32)
    for e in range(local):
        share = torch.where(row_idx == e, row_probs, 0.0).sum(1, keepdim=True)
        out = out + share * torch.tanh(rows.float() @ own[e])
    return combine_rows(family, group, on_rows(out.to(x.dtype)), handle, **flags)[0]


def plain_moe(x, idx, probs, weights):
    """The layer of `moe` without an exchange: every rank has all the experts."""
    out = torch.zeros_like(x)
    for k in range(idx.size(1)):
        chosen = weights[idx[:, k].clamp(min=0)]
        share = torch.where(idx[:, k] >= 0, probs[:, k], 0.0).unsqueeze(1)
        out = out + share * torch.tanh(torch.bmm(x.unsqueeze(1), chosen).squeeze(1))
    return out


def leaves(x, probs):
    return x.clone().requires_grad_(), probs.clone().requires_grad_()


def assert_near(got, want, dtype):
    """Near for a value that was rounded to `dtype` a few times on its way."""
    tolerance = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}[dtype]
    scale = max(float(want.abs().max()), 1.0) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)


def check_layer(family, group, rank, num_tokens, num_experts, topk, dtype=torch.bfloat16, **flags):
    """Output and gradients of one layer against the plain one."""
    x, idx, probs = inputs(rank, num_tokens, topk, num_experts, dtype)
    weights = expert_weights(num_experts)
    towards = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank))
    ours, their = leaves(x, probs), leaves(x.double(), probs.double())
    out = moe(family, group, ours[0], idx, ours[1], weights, **flags)
    (out.float() * towards).sum().backward()
    want = plain_moe(their[0], idx, their[1], weights.double())
    (want * towards.double()).sum().backward()
    check_grads(out, want, ours, their, dtype)


def check_grads(out, want, ours, their, dtype):
    assert out.dtype == dtype
    assert_near(out.detach(), want.detach(), dtype)
    for leaf, plain in zip(ours, their):
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.is_contiguous()
        assert_near(leaf.grad, plain.grad, dtype)
