# SPDX-License-Identifier: Apache-2.0
"""How many rows an expert gets: capacity, and padding for quantised matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch

from .config import option

Tensor = torch.Tensor


def get_capacity(
    num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None
) -> int:
    """ceil(num_tokens / num_experts * capacity_factor), at least `min_capacity`."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """Sets entries of the map bool [T, E] until each column's count is a multiple of pad_multiple.

    Takes a column's first clear entries, in row order; a column with too few of them is filled
    as far as it goes. Changes `routing_map` itself and returns it.
    """
    counts = routing_map.sum(0)
    missing = -counts % pad_multiple
    is_clear = ~routing_map
    routing_map |= is_clear & (is_clear.cumsum(0) <= missing)
    return routing_map


def get_align_size_for_quantization(config: Any) -> int:
    """The multiple of rows that the experts' matrix products want; 0: any."""
    if option(config, "use_transformer_engine_op_fuser") or option(
        config, "moe_use_grouped_tensor"
    ):
        return 256
    if option(config, "fp8"):
        recipe = option(config, "fp8_recipe")
        return 32 if getattr(recipe, "value", recipe) == "mxfp8" else 16
    return 128 if option(config, "fp4") else 0


def skip_routed_expert_padding(config: Any) -> bool:
    """Whether rows reach the experts padded already, so that the experts must not pad again."""
    if option(config, "moe_router_padding_for_quantization"):
        return True
    if option(config, "moe_token_dispatcher_type") != "flex":
        return False
    backend = option(config, "moe_flex_dispatcher_backend")
    if backend in ("hybridep", "ncclep"):
        return True
    pads_in_permute = option(config, "moe_permute_fusion")
    return bool(option(config, "moe_use_grouped_tensor") and pads_in_permute)
