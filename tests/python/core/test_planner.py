# SPDX-License-Identifier: Apache-2.0
"""weft.planner: what tests of the C++ planner do not see, its tensors."""

import pytest
import torch

import weft
from weft.planner import plan_balance

COUNTS = torch.tensor([[90, 10, 0, 20], [70, 0, 30, 20]])  # of two ranks and four experts


def test_popular_experts_get_replicas():
    found = plan_balance(COUNTS, 1)
    assert found.placement.dtype == torch.int32 and found.placement.tolist() == [[-1], [0]]
    assert found.rows_of_ranks.tolist() == [120, 120]
    assert found.quotas.tolist() == [[90, 10, 0, 0, 20, 0], [20, 0, 0, 30, 20, 50]]
    assert plan_balance(COUNTS, 0).placement.shape == (2, 0)
    assert plan_balance(COUNTS, 1, min_rows=100).placement.tolist() == [[-1], [-1]]


def test_replicas_take_blocks():
    found = plan_balance(COUNTS, 1, block_rows=32)
    assert found.placement.tolist() == [[-1], [0]] and found.rows_of_ranks.tolist() == [106, 134]
    assert found.quotas[:, 5].tolist() == [64, 0]  # the first rows of the expert
    assert found.quotas[:, 0].tolist() == [26, 70]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routes_are_assigned_in_token_order(dtype):
    found = plan_balance(COUNTS, 1)
    idx = torch.tensor([0] * 70 + [2] * 30 + [3] * 20 + [-1] * 4, dtype=dtype).view(-1, 2)
    there = found.assign(1, idx)
    assert there.dtype == dtype and there.shape == idx.shape
    counts = there[there >= 0].bincount(minlength=6)
    assert counts.tolist() == found.quotas[1].tolist()
    assert there.flatten().tolist() == [0] * 20 + [5] * 50 + [3] * 30 + [4] * 20 + [-1] * 4


def test_what_does_not_fit_is_refused():
    for counts, replicas, options, reason in [
        (COUNTS.float(), 1, {}, "counts is torch.float32"),
        (COUNTS[0], 1, {}, "counts is torch.int64 [4] (expected integers"),
        (COUNTS[:, :3], 1, {}, "the number of counts is 6 (2 ranks times experts"),
        (-COUNTS, 1, {}, "a count is -90"),
        (COUNTS, 17, {}, "replicas is 17 (0 to 16)"),
        (COUNTS, 1, {"min_rows": 0}, "min_rows is 0"),
        (COUNTS, 1, {"block_rows": 0}, "block_rows is 0 (1 to 1024)"),
    ]:
        with pytest.raises(weft.InvalidArgument) as refused:
            plan_balance(counts, replicas, **options)
        assert reason in str(refused.value)
    found = plan_balance(COUNTS, 1)
    with pytest.raises(weft.InvalidArgument, match="source = 2"):
        found.assign(2, torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(weft.InvalidArgument, match="more routes to expert 2 than"):
        found.assign(0, torch.full((1, 1), 2))
