# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of an MoE layer with replicas on GPUs have the bits of those without."""

import pytest
import torch

from balanced_layer import check_steps, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def trained_on_gpus(rank, num_ranks, group, mode, block_rows):
    return trained(rank, num_ranks, group, mode, block_rows, on_gpus=True)


@pytest.mark.parametrize(("num_ranks", "block_rows"), [(2, 16), (4, 32), (8, 128)])
def test_three_steps_have_the_bits_of_those_without_replicas(ranks, num_ranks, block_rows):
    plain = ranks(trained_on_gpus, num_ranks, "plain", block_rows)
    blocks = ranks(trained_on_gpus, num_ranks, "blocks", block_rows)
    check_steps(plain, blocks, block_rows)
