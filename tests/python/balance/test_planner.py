# SPDX-License-Identifier: Apache-2.0
"""weft.planner: what tests of the C++ planner do not see, its tensors."""

import pytest
import torch

import weft
from weft.planner import plan_balance

COUNTS = torch.tensor([[90, 10, 0, 20], [70, 0, 30, 20]])  # of two ranks and four experts


def check_quotas(found):
    """Every route has a place of its expert."""
    masters = torch.arange(4).view(2, 2)
    logical = torch.cat([masters, found.placement], dim=1).flatten()
    assert not found.quotas[:, logical < 0].any()
    sums = torch.zeros_like(COUNTS).index_add_(1, logical.clamp(min=0), found.quotas)
    assert torch.equal(sums, COUNTS)
    assert torch.equal(found.rows_of_ranks, found.quotas.sum(0).view(2, -1).sum(1))


def test_popular_experts_get_replicas():
    found = plan_balance(COUNTS, 1)
    check_quotas(found)
    assert found.placement.dtype == torch.int32 and found.placement.tolist() == [[-1], [0]]
    assert found.rows_of_ranks.max() <= 122 and COUNTS[:, :2].sum() > 122
    assert plan_balance(COUNTS, 0).placement.shape == (2, 0)
    assert plan_balance(COUNTS, 1, min_rows=100).placement.tolist() == [[-1], [-1]]


def test_replicas_have_to_spare_more_than_they_cost():
    spared = int(COUNTS[:, :2].sum() - plan_balance(COUNTS, 1).rows_of_ranks.max())
    assert spared > 1
    for cost, expected in [(0, 0), (spared - 1, 0), (spared, -1), (2**31 - 1, -1)]:
        found = plan_balance(COUNTS, 1, replica_rows=cost)
        check_quotas(found)
        assert found.placement.tolist() == [[-1], [expected]]


def test_the_rank_that_moves_most_decides_what_replicas_cost():
    counts = torch.tensor([[60, 0, 0, 0]] * 4)  # a quarter of it goes to each of three ranks
    spared = 240 - int(plan_balance(counts, 1).rows_of_ranks.max())
    for cost, copies in [((spared - 1) // 3, 3), (spared // 3 + 1, 0)]:
        placement = plan_balance(counts, 1, replica_rows=cost).placement
        assert (placement >= 0).sum() == copies


def test_what_a_replica_costs_in_rows():
    assert weft.replica_rows(0, 10) == 1
    assert weft.replica_rows(1000, 10) == 100
    assert weft.replica_rows(1001, 10) == 101
    assert weft.replica_rows(1000, 10, row_seconds=0.25, link_rate=40) == 50
    with pytest.raises(weft.InvalidArgument, match="row_bytes = 0"):
        weft.replica_rows(1, 0)


def test_replicas_take_blocks():
    found = plan_balance(COUNTS, 1, block_rows=32)
    check_quotas(found)
    assert found.placement.tolist() == [[-1], [0]]
    rows = int(found.quotas[:, 5].sum())
    assert rows > 0 and rows % 32 == 0
    assert found.quotas[:, 5].tolist() == [min(rows, 90), max(rows - 90, 0)]  # the first of them


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routes_are_assigned_in_token_order(dtype):
    found = plan_balance(COUNTS, 1)
    idx = torch.tensor([0] * 70 + [2] * 30 + [3] * 20 + [-1] * 4, dtype=dtype).view(-1, 2)
    there = found.assign(1, idx)
    assert there.dtype == dtype and there.shape == idx.shape
    first = int(found.quotas[1, 0])
    want = [0] * first + [5] * (70 - first) + [3] * 30 + [4] * 20 + [-1] * 4
    assert there.flatten().tolist() == want


def test_what_does_not_fit_is_refused():
    for counts, replicas, options, reason in [
        (COUNTS.float(), 1, {}, "counts is torch.float32"),
        (COUNTS[0], 1, {}, "counts is torch.int64 [4] (expected integers"),
        (COUNTS[:, :3], 1, {}, "the number of counts is 6 (2 ranks times experts"),
        (-COUNTS, 1, {}, "a count is -90"),
        (COUNTS + 2**32, 1, {}, "counts has torch.int64 values that are no int32"),
        (COUNTS, 17, {}, "replicas is 17 (0 to 16)"),
        (COUNTS, 1, {"min_rows": 0}, "min_rows is 0"),
        (COUNTS, 1, {"replica_rows": -1}, "replica_rows is -1 (0 to"),
        (COUNTS, 1, {"block_rows": 0}, "block_rows is 0 (1 to 1024)"),
    ]:
        with pytest.raises(weft.InvalidArgument) as refused:
            plan_balance(counts, replicas, **options)
        assert reason in str(refused.value)
    found = plan_balance(COUNTS, 1)
    with pytest.raises(weft.InvalidArgument, match="source = 2"):
        found.assign(2, torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(weft.InvalidArgument, match="topk_idx has torch.int64 values"):
        found.assign(0, torch.full((1, 1), 2**32 + 1))
    for wrong in (torch.tensor([[1.5], [0.0]]), torch.tensor([[2**32 + 2], [0]])):
        with pytest.raises(weft.InvalidArgument, match="placement has .* values that are no int32"):
            weft.Placement(wrong)
    with pytest.raises(weft.InvalidArgument, match="more routes to expert 2 than"):
        found.assign(0, torch.full((1, 1), 2))
