# SPDX-License-Identifier: Apache-2.0
"""The user's choice of communication overlap, and how it reaches the other configurations."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from weft.dispatcher.checks import expect

from . import derive
from .rules import validate_user_overlap
from .settings import option

logger = logging.getLogger(__name__)

_MOE_FLAGS = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
_MODEL_FIELDS = (
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
    *_MOE_FLAGS,
)
_DATA_PARALLEL_FIELDS = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "align_param_gather",
    "bucket_size",
)


@dataclass(kw_only=True)
class CommOverlapConfig:
    """Names and defaults of Megatron-Bridge. None: setup() chooses; the MoE flags are then off."""

    tp_comm_overlap: bool
    tp_comm_overlap_cfg: Any = None  # a dataclass or a dict of Transformer Engine's settings
    tp_comm_bootstrap_backend: str | None = "nccl"
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None
    data_parallel_size: int | None = None
    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None

    # The values that finalize() found. Not a field: nobody passes it.
    user_comm_overlap_cfg = None

    def finalize(self) -> None:
        """Takes down the user's values, the first time only: later changes have no effect."""
        if self.user_comm_overlap_cfg is None:
            self.user_comm_overlap_cfg = replace(self)

    def setup(self, model_config: Any, optimizer_config: Any, ddp_config: Any) -> None:
        """Checks the rules, then writes the overlap settings into the three configurations.

        Values that were set on them directly are overwritten; settings that they do not have are
        left out. The optimizer's and DDP's are written for the distributed optimizer only.

        Raises AssertionError with the text of the broken rule, or where the model has no field
        for the overlap; TypeError where num_moe_experts is None; ValueError for delayed weight
        gradients with version 2 of Megatron-FSDP. Nothing is written then.
        """
        self.finalize()
        values = self._get_model_comm_overlap_cfgs(model_config, ddp_config)
        for name in _MOE_FLAGS:
            if option(model_config, name) and not values[name]:
                logger.warning("setup: %s of the model is overwritten with False.", name)
        _write(values, model_config)
        if getattr(ddp_config, "use_distributed_optimizer", False):
            values = self._get_optimizer_overlap_cfgs(model_config)
            _write(values, optimizer_config)
            _write(values, ddp_config)

    def _get_model_comm_overlap_cfgs(self, model_config: Any, ddp_config: Any) -> dict[str, Any]:
        """What setup() writes into the model's configuration. Raises what setup() raises."""
        user = self.user_comm_overlap_cfg
        expect(
            hasattr(model_config, "overlap_moe_expert_parallel_comm"),
            f"model_cfg: {model_config} does not have overlap_moe_expert_parallel_comm",
        )
        validate_user_overlap(user, model_config, ddp_config)
        values = {
            **derive.tensor_parallel(user, model_config),
            **derive.pipeline_parallel(model_config),
            "defer_embedding_wgrad_compute": False,
            "wgrad_deferral_limit": -1,
            "overlap_moe_expert_parallel_comm": False,
            "delay_wgrad_compute": False,
        }
        return values | _given(user, _MODEL_FIELDS)

    def _get_optimizer_overlap_cfgs(self, model_config: Any) -> dict[str, Any]:
        """What setup() writes for data parallelism: the user's values alone where its size is not
        known."""
        size = self.data_parallel_size
        values = {} if size is None else derive.data_parallel(size, model_config)
        return values | _given(self.user_comm_overlap_cfg, _DATA_PARALLEL_FIELDS)


def _given(user: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(user, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _write(values: dict[str, Any], config: Any) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
