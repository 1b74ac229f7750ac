# SPDX-License-Identifier: Apache-2.0
"""Groups, random routing, a run through all phases, and the dense layer to compare with.

Every rank makes the data of all ranks from one seed, so that the dense layer needs no exchange.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.dispatcher import (
    DispatcherConfig,
    DispatcherGroups,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)


@contextmanager
def groups(tp: int, ep: int):
    """The groups of this rank among TP x EP ranks, TP ranks next to each other."""
    rank = dist.get_rank()
    made = []

    def pick(lists):
        mine = None
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = group
                made.append(group)
        return mine

    ep_group = pick([[e * tp + t for e in range(ep)] for t in range(tp)])
    tp_group = pick([[e * tp + t for t in range(tp)] for e in range(ep)])
    try:
        yield DispatcherGroups(ep_group, tp_group, dist.group.WORLD)
    finally:
        dist.barrier()
        for group in made:
            dist.destroy_process_group(group)


def dispatcher(kind: str, process_groups, config: DispatcherConfig):
    """A dispatcher of kind "alltoall" or of a flex backend."""
    local = config.num_moe_experts // process_groups.ep.size()
    first = process_groups.ep.rank() * local
    config.moe_flex_dispatcher_backend = kind
    config.moe_token_dispatcher_type = "alltoall" if kind == "alltoall" else "flex"
    make = MoEAlltoAllTokenDispatcher if kind == "alltoall" else MoEFlexTokenDispatcher
    return make(local, list(range(first, first + local)), config, process_groups)


@dataclass
class Routing:
    x: torch.Tensor  # [T, H]
    routing_map: torch.Tensor  # bool [T, E]
    probs: torch.Tensor  # [T, E]


def routing(seed, num_tokens, hidden, num_experts, topk, *, unrouted=0.0, dtype=torch.float32):
    """T tokens with top-k choices; a share `unrouted` of the choices is taken out again."""
    maker = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=maker).to(dtype)
    scores = torch.rand(num_tokens, num_experts, generator=maker)
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
    chosen &= torch.rand(num_tokens, num_experts, generator=maker) >= unrouted
    probs = (torch.rand(num_tokens, num_experts, generator=maker) + 0.1) * chosen
    return Routing(x, chosen, probs)


def run(made, x, routing_map, probs, experts):
    """All phases; `experts(rows, counts, row_probs)` -> rows. Returns output and counts."""
    hidden, travelling = made.dispatch_preprocess(x, routing_map, probs)
    rows, row_probs = made.token_dispatch(hidden, travelling)
    rows, counts, row_probs = made.dispatch_postprocess(rows, row_probs)
    out = experts(rows, counts, row_probs)
    out = made.combine_preprocess(out)
    out = made.token_combine(out)
    return made.combine_postprocess(out), counts


def weigh(rows, counts, row_probs):
    """Experts that do nothing but multiply by the probability."""
    used = int(counts.sum())
    out = rows[:used] * row_probs[:used, None].to(rows.dtype)
    return torch.cat([out, rows.new_zeros(rows.shape[0] - used, rows.shape[1])])


class Experts:
    """Two-layer experts; TP rank t of TP has a share of the inner columns."""

    def __init__(self, seed, num_experts, hidden, inner, dtype=torch.float32):
        maker = torch.Generator().manual_seed(seed)
        self.w1 = torch.randn(num_experts, hidden, inner, generator=maker).to(dtype) / hidden**0.5
        self.w2 = torch.randn(num_experts, inner, hidden, generator=maker).to(dtype) / inner**0.5

    def shard(self, experts, tp, tp_rank):
        """The weights of these experts on one TP rank, as leaves."""
        inner = self.w1.shape[2] // tp
        part = slice(tp_rank * inner, (tp_rank + 1) * inner)
        w1 = self.w1[experts][:, :, part].clone().requires_grad_()
        w2 = self.w2[experts][:, part].clone().requires_grad_()
        return w1, w2


def feed_forward(rows, w1, w2, weight):
    return (torch.nn.functional.silu(rows @ w1) * weight[:, None].to(rows.dtype)) @ w2


def grouped(w1, w2):
    """Experts for `run`: blocks of rows, one after the other; unused rows are not touched."""

    def experts(rows, counts, row_probs):
        out, begin = [], 0
        for e, count in enumerate(counts.tolist()):
            block = slice(begin, begin + count)
            out.append(feed_forward(rows[block], w1[e], w2[e], row_probs[block]))
            begin += count
        out.append(rows.new_zeros(rows.shape[0] - begin, rows.shape[1]))
        return torch.cat(out)

    return experts


def dense(cases, weights, keep=None):
    """The layer without any dispatch: per source rank (output, leaf x, leaf probs); and the leaf
    weights. keep: list of bool [T, E] of the routes that count, by rank; default the maps."""
    w1 = weights.w1.clone().requires_grad_()
    w2 = weights.w2.clone().requires_grad_()
    results = []
    for r, case in enumerate(cases):
        x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
        kept = case.routing_map if keep is None else keep[r]
        out = torch.zeros_like(x)
        for e in range(w1.shape[0]):
            token = kept[:, e].nonzero().flatten()
            out = out.index_add(0, token, feed_forward(x[token], w1[e], w2[e], probs[token, e]))
        results.append((out, x, probs))
    return results, w1, w2


def check_against_dense(made, kind, tp, ep, cases, weights, *, keep=None, rtol=1e-4, atol=1e-5):
    """Runs `made` on this rank's case, forward and backward, beside the dense layer."""
    rank = dist.get_rank()
    experts = slice(made.local_expert_indices[0], made.local_expert_indices[-1] + 1)
    w1, w2 = weights.shard(experts, tp, made.tp_rank)
    case = cases[rank]
    x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
    out, counts = run(made, x, case.routing_map, probs, grouped(w1, w2))
    direction = [
        torch.randn(c.x.shape, generator=torch.Generator().manual_seed(50 + r))
        for r, c in enumerate(cases)
    ]
    (out * direction[rank]).sum().backward()

    results, dense_w1, dense_w2 = dense(cases, weights, keep)
    sum((o * d).sum() for (o, _, _), d in zip(results, direction)).backward()
    dense_out, dense_x, dense_probs = results[rank]
    near = {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(out, dense_out, **near)
    torch.testing.assert_close(x.grad, dense_x.grad, **near)
    routed = case.routing_map if keep is None else keep[rank]
    torch.testing.assert_close(probs.grad * routed, dense_probs.grad, **near)
    assert not (probs.grad * ~case.routing_map).any(), f"{kind}: unrouted gradient"
    inner = w1.shape[2]
    part = slice(made.tp_rank * inner, (made.tp_rank + 1) * inner)
    torch.testing.assert_close(w1.grad, dense_w1.grad[experts][:, :, part], **near)
    torch.testing.assert_close(w2.grad, dense_w2.grad[experts][:, part], **near)
    return out.detach(), counts
