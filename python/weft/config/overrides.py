# SPDX-License-Identifier: Apache-2.0
"""The switch of performance recipes for the overlap."""

from __future__ import annotations

from typing import Any

from .comm_overlap import CommOverlapConfig
from .settings import option


def _set_moe_a2a_overlap_overrides(recipe: Any, moe_a2a_overlap: bool = False) -> Any:
    """Turns on the overlap and the delayed weight gradients in `recipe`, and returns it.

    It has `model` and `comm_overlap`, which is created where it is None. False changes nothing.
    Nothing is checked here: CommOverlapConfig.setup() does that.
    """
    if not moe_a2a_overlap:
        return recipe
    if getattr(recipe, "comm_overlap", None) is None:
        is_parallel = option(recipe.model, "tensor_model_parallel_size") > 1
        recipe.comm_overlap = CommOverlapConfig(tp_comm_overlap=is_parallel)
    recipe.comm_overlap.overlap_moe_expert_parallel_comm = True
    recipe.comm_overlap.delay_wgrad_compute = True
    recipe.model.moe_shared_expert_overlap = False
    return recipe
