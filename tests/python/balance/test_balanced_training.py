# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of an MoE layer with replicas have the bits of those without."""

import pytest
import torch

from balanced_layer import check_steps, same, trained


@pytest.mark.parametrize(("num_ranks", "block_rows"), [(2, 16), (4, 32), (8, 128)])
def test_three_steps_have_the_bits_of_those_without_replicas(ranks, num_ranks, block_rows):
    plain = ranks(trained, num_ranks, "plain", block_rows)
    blocks = ranks(trained, num_ranks, "blocks", block_rows)
    check_steps(plain, blocks, block_rows)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_that_stay_take_blocks_too(ranks, num_ranks):
    plain = ranks(trained, num_ranks, "plain", 16, 1)
    placed = ranks(trained, num_ranks, "placed", 16, 1)
    for ((want,), *_), ((found,), *_) in zip(plain, placed, strict=True):
        assert same(found, want)
    assert sum(moved for *_, moved, _ in placed) >= 16


@pytest.mark.parametrize("again", [False, True])
def test_checkpointed_experts_have_the_same_bits(ranks, again):
    plain = ranks(trained, 2, "plain", 16, 1)
    blocks = ranks(trained, 2, "blocks", 16, 1, again)
    for ((want,), *_), ((found,), *_) in zip(plain, blocks, strict=True):
        assert same(found, want)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_any_replicas_give_the_same_outputs_and_input_gradients(ranks, num_ranks):
    plain = ranks(trained, num_ranks, "plain", 0, 1)
    places, again = (ranks(trained, num_ranks, "places", 0, 1) for _ in range(2))
    for ((want,), *_, bound), ((found,), *_) in zip(plain, places, strict=True):
        assert same(found[:3], want[:3])  # the router's too
        torch.testing.assert_close(found[3], want[3])
        assert ((found[4].double() - want[4].double()).abs() <= 2 * bound).all()
    assert not all(same(found[0], want[0]) for (found, *_), (want, *_) in zip(places, plain))
    for (one, *_), (other, *_) in zip(places, again, strict=True):
        assert same(one[0], other[0])
