# SPDX-License-Identifier: Apache-2.0
"""Products by blocks: their values, and what they refuse."""

import pytest
import torch

import weft
from weft.block_products import block_linear

COUNTS = [5, 0, 9]


def made(dtype):
    gen = torch.Generator().manual_seed(3)
    rows, weight, grad = (
        torch.randint(-4, 5, shape, generator=gen).to(dtype)  # so that sums are exact
        for shape in ((16, 6), (3, 6, 7), (16, 7))
    )
    return rows.requires_grad_(), weight.requires_grad_(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [1, 4, 128])
def test_a_block_is_multiplied_by_its_experts_weight(dtype, block_rows):
    rows, weight, grad = made(dtype)
    out = block_linear(rows, weight, COUNTS, block_rows)
    out.backward(grad)
    blocks = rows.split([*COUNTS, 2])
    want = torch.cat([*(b @ weight[e] for e, b in enumerate(blocks[:3])), out.new_zeros(2, 7)])
    assert out.dtype == dtype and torch.equal(out, want)
    grads = torch.autograd.grad(want, (rows, weight), grad)
    assert torch.equal(rows.grad, grads[0]) and torch.equal(weight.grad, grads[1])


def test_a_gradient_is_rounded_once():
    """4096 + 1 + 1 + 1 + 1 in bf16, a row at a time."""
    rows = torch.tensor([[4096.0], [8], [8], [8], [8]]).bfloat16()
    weight = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    block_linear(rows, weight, [5], 1).backward(torch.ones(5, 1).bfloat16())
    assert weight.grad.item() == 4128


def test_what_does_not_fit_is_refused():
    rows, weight, _ = made(torch.float32)
    for counts, block_rows, reason in [
        ([5, 9], 128, "counts = [5, 9] (expected 3 of at least 0"),
        ([5, -1, 9], 128, "of at least 0"),
        ([5, 3, 9], 128, "at most 16 rows"),
        (COUNTS, 0, "block_rows = 0"),
    ]:
        with pytest.raises(weft.InvalidArgument) as refused:
            block_linear(rows, weight, counts, block_rows)
        assert reason in str(refused.value)


def blocks_refused(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks)
    balance = weft.Balance(exchange, replicas=1, shapes=[(4, 4)], dtypes=torch.float32)
    placement = torch.tensor([[-1], [0]], dtype=torch.int32)
    rows, weight = torch.ones(3, 4), torch.ones(1, 4, 4, requires_grad=True)

    def twice(rows, weight):
        return block_linear(block_linear(rows, weight, [1, 2]), weight, [1, 2])

    with pytest.raises(weft.InvalidArgument, match="wgrad = 'tiles' is unknown"):
        balance.apply(placement, twice, rows, weight, wgrad="tiles")
    out = balance.apply(placement, twice, rows, weight, wgrad="blocks")
    with pytest.raises(weft.InvalidArgument, match="a weight was used twice"):
        out.sum().backward()
    flat = weft.Balance(exchange, replicas=1, shapes=[(4,)], dtypes=torch.float32)
    with pytest.raises(weft.InvalidArgument, match=r"weights\[0\] has 2 dimensions"):
        flat.apply(placement, twice, rows, torch.ones(1, 4), wgrad="blocks")


def plans_refused(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks)
    idx = torch.zeros(3, 1, dtype=torch.int64)
    texts = []
    for block_rows in (0, 1025, 4 + rank):
        for balance in (
            weft.Balancing(1, block_rows=block_rows),
            weft.Placement([[-1], [0]], block_rows=block_rows),
        ):
            with pytest.raises(weft.InvalidArgument) as told:
                exchange.plan(idx, balance=balance)
            texts.append(str(told.value))
    return texts


def test_blocks_of_other_sizes_are_refused(ranks):
    first, second = ranks(plans_refused, 2)
    for texts in (first, second):
        assert all("block_rows = 0 of replicas (1 to 1024)" in text for text in texts[:2])
    assert "block_rows = 1025 of replicas" in first[2] and "block_rows = 1025" in first[3]
    assert "block_rows of replicas = 4 here and 5 on rank 1" in first[4]
    assert "block_rows of replicas = 5 here and 4 on rank 0" in second[5]


def test_blocks_that_are_refused(ranks):
    ranks(blocks_refused, 2)
