# SPDX-License-Identifier: Apache-2.0
"""Choices of a token as a row of flags."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def indices_to_multihot(indices: Tensor, probs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """indices int [N, K], probs [N, K] -> map bool [N, E], probs [N, E] in the dtype of `probs`.

    -1 is no choice: it sets nothing, and its probability gets gradient 0. An expert that a token
    names twice gets the sum. Differentiable in `probs`; no wait for a GPU.
    """
    num_rows = indices.shape[0]
    # -1 goes to a column of its own that is cut off.
    column = indices.long()
    column = column.masked_fill(column < 0, num_experts)
    routing_map = torch.zeros(
        (num_rows, num_experts + 1), dtype=torch.bool, device=indices.device
    ).scatter(1, column, True)
    spread = probs.new_zeros((num_rows, num_experts + 1)).scatter_add(1, column, probs)
    return routing_map[:, :num_experts].contiguous(), spread[:, :num_experts].contiguous()


# The name that Megatron-LM and NeMo Automodel use.
fused_indices_to_multihot = indices_to_multihot
