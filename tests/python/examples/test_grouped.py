# SPDX-License-Identifier: Apache-2.0
"""The grouped product: gradients, and when it lets go of its rows."""

import weakref

import pytest
import torch

from weft.overlap import experts as grouped


def operands(counts, dtype=torch.float64):
    gen = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), 5, generator=gen, dtype=dtype).requires_grad_()
    weights = torch.randn(len(counts), 5, 3, generator=gen, dtype=dtype).requires_grad_()
    return rows, weights, grouped.row_ends(torch.tensor(counts), rows)


@pytest.mark.parametrize("counts", [(4, 0, 3), (0, 0, 0), (0, 7, 0)])
def test_equals_a_product_for_each_expert(counts):
    rows, weights, ends = operands(counts)
    out = grouped.grouped_product(rows, weights, ends)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    want = torch.einsum("pa,pab->pb", rows, weights[expert])
    torch.testing.assert_close(out, want)
    direction = torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad((out * direction).sum(), (rows, weights))
    torch.testing.assert_close(got, torch.autograd.grad((want * direction).sum(), (rows, weights)))


def test_leaves_out_rows_behind_the_last_end():
    rows, weights, _ = operands((4, 0, 3))
    ends = grouped.row_ends(torch.tensor([2, 0, 3]), rows)
    out = grouped.grouped_product(rows, weights, ends)
    torch.testing.assert_close(out[:2], rows[:2] @ weights[0])
    torch.testing.assert_close(out[2:5], rows[2:5] @ weights[2])
    assert torch.equal(out[5:], torch.zeros(2, 3, dtype=out.dtype))
    out.sum().backward()
    assert torch.equal(rows.grad[5:], torch.zeros(2, 5, dtype=out.dtype))
    torch.testing.assert_close(weights.grad[2], rows[2:5].T @ torch.ones(3, 3, dtype=out.dtype))


def test_leaves_out_gradients_that_nobody_wants():
    rows, weights, ends = operands((4, 3))
    grouped.grouped_product(rows.detach(), weights, ends).sum().backward()
    assert weights.grad is not None
    grouped.grouped_product(rows, weights.detach(), ends).sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_rows_are_gone_before_their_gradient_is_made(monkeypatch, keeps_graph):
    leaf, weights, ends = operands((4, 3))
    rows = leaf * 2
    held = weakref.ref(rows.untyped_storage())
    out = grouped.grouped_product(rows, weights, ends)
    del rows
    alive = []
    product = grouped.product

    def watched(*args):
        alive.append(held() is not None)
        return product(*args)

    monkeypatch.setattr(grouped, "product", watched)
    out.sum().backward(retain_graph=keeps_graph)
    assert alive == [keeps_graph]
    if keeps_graph:
        first = leaf.grad.clone()
        out.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * first)
