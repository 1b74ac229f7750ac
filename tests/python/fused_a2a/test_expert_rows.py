# SPDX-License-Identifier: Apache-2.0
"""Rows by expert on a buffer's exchanges: life, gradients and what is refused."""

import fused_cases as cases
import pytest
import torch

import weft.fused_a2a as fa
from weft.fused_a2a import rank_rows

CALLS = {"deepep": rank_rows.DEEPEP, "uccl": rank_rows.UCCL}


def layer(by_expert, group, x, idx, probs, num_experts, factor=2.0):
    rows, row_probs, counts, handle = by_expert.dispatch_by_expert(
        x, idx, probs, num_experts, group, pad_multiple=cases.PAD
    )
    out = by_expert.combine_by_expert((rows * factor * row_probs).to(x.dtype), handle)
    return out, rows, row_probs, counts, handle


def life(rank, num_ranks, group, name):
    """Backward without the forward's inputs and after the buffer is gone; no gradient wanted."""
    cases.reset()
    num_experts = 4 * num_ranks
    x, idx, probs = cases.inputs(rank, (9, 0)[rank], 3, num_experts, torch.float32)
    xs, ps = cases.leaves(x, probs)
    x_in, p_in, idx_in = xs * 1.0, ps * 1.0, idx.clone()
    out, _, _, counts, handle = layer(CALLS[name], group, x_in, idx_in, p_in, num_experts)
    state = {"deepep": "_buffer", "uccl": "_uccl_buffer"}[name]
    assert getattr(fa, state).group is group
    assert counts.dtype == torch.int64 and int(counts.sum()) == handle.plan.num_rows
    real = handle.plan.rows_per_expert_list
    blocks = [[e] * n + [-1] * (p - n) for e, (n, p) in enumerate(zip(real, counts.tolist()))]
    assert handle.local_experts.flatten().tolist() == sum(blocks, [])
    for tensor in (x_in, p_in, idx_in):
        tensor.detach().untyped_storage().resize_(0)
    weights = (probs * (idx >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(out, 2 * x * weights)
    cases.reset()
    out.sum().backward()
    torch.testing.assert_close(xs.grad, (2 * weights).expand_as(x))
    torch.testing.assert_close(ps.grad, 2 * x.sum(1, keepdim=True) * (idx >= 0))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            silent = layer(CALLS[name], group, x, idx, probs, num_experts)[0]
        assert not silent.requires_grad and torch.equal(silent, out)


@pytest.mark.parametrize("name", CALLS)
def test_backward_needs_neither_inputs_nor_buffer(ranks, name):
    ranks(life, 2, name)


def unused_outputs(rank, num_ranks, group):
    """A rank that uses no row, or no probability, takes part in the backward all the same."""
    cases.reset()
    x, idx, probs = cases.inputs(rank, 6, 3, 8, torch.float32)
    xs, ps = cases.leaves(x, probs)
    rows, row_probs, _, _ = CALLS["deepep"].dispatch_by_expert(xs, idx, ps, 8, group)
    (rows.sum() if rank == 0 else row_probs.sum()).backward()
    experts_per_rank = 4
    is_first = (idx >= 0) & (idx < experts_per_rank)
    assert torch.equal(xs.grad, is_first.sum(1, keepdim=True).float().expand_as(x))
    assert torch.equal(ps.grad, (idx >= experts_per_rank).float())


def test_gradients_of_unused_outputs_are_zero(ranks):
    ranks(unused_outputs, 2)


def second_order(rank, num_ranks, group):
    cases.reset()
    x, idx, probs = cases.inputs(rank, (6, 3)[rank], 3, 8, torch.float32)
    xs, ps = cases.leaves(x, probs)
    out = layer(CALLS["deepep"], group, xs, idx, ps, 8)[0]
    (grad,) = torch.autograd.grad(out.square().sum(), xs, create_graph=True)
    weights = probs.sum(1, keepdim=True)
    torch.testing.assert_close(grad, 8 * weights**2 * x)
    grad.sum().backward()
    torch.testing.assert_close(xs.grad, (8 * weights**2).expand_as(x))
    torch.testing.assert_close(ps.grad, 16 * weights * x.sum(1, keepdim=True) * (idx >= 0))


def test_second_order_of_rows_by_expert(ranks):
    ranks(second_order, 2)
