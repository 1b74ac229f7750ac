# SPDX-License-Identifier: Apache-2.0
"""The user's choice of communication overlap, and how it reaches the other configurations, once
validate.py has checked it."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib.util import find_spec
from typing import Any

from weft.dispatcher.config import expect, option

from .validate import validate_user_overlap

logger = logging.getLogger(__name__)

_BUCKET_SIZE = 128 * 1024 * 1024  # parameters
_MOE_FLAGS = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


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
        """Copies the user's values, the first time only: later changes have no effect."""
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
        """Returns what setup() writes into the model's configuration. Raises as setup() does."""
        user = self.user_comm_overlap_cfg
        expect(
            hasattr(model_config, "overlap_moe_expert_parallel_comm"),
            f"model_cfg: {model_config} does not have overlap_moe_expert_parallel_comm",
        )
        validate_user_overlap(user, model_config, ddp_config)
        has_pipeline = option(model_config, "pipeline_model_parallel_size") > 1
        is_interleaved = _num_chunks(model_config) > 1
        values = {
            # Messages between stages overlap where chunks interleave, and are batched elsewhere.
            "overlap_p2p_comm": has_pipeline and is_interleaved,
            "batch_p2p_comm": has_pipeline and not is_interleaved,
            "defer_embedding_wgrad_compute": False,
            "wgrad_deferral_limit": -1,
            "overlap_moe_expert_parallel_comm": False,
            "delay_wgrad_compute": False,
        }
        return _tensor_parallel(user, model_config) | values | _given(user, values)

    def _get_optimizer_overlap_cfgs(self, model_config: Any) -> dict[str, Any]:
        """Returns what setup() writes for data parallelism: if the number of ranks is unknown, only
        the user's values."""
        size = self.data_parallel_size
        values = _data_parallel(size or 1, model_config)
        given = _given(self.user_comm_overlap_cfg, values)
        return given if size is None else values | given


def _given(user: Any, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(user, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


# Set even on configurations that do not declare it.
_SET_ANYWAY = ("tp_comm_overlap_cfg",)


def _write(values: dict[str, Any], config: Any) -> None:
    for name, value in values.items():
        if hasattr(config, name) or name in _SET_ANYWAY:
            setattr(config, name, value)


# The settings that follow from the parallel layout, before the user's values.


def _tensor_parallel(user: Any, model: Any) -> dict[str, Any]:
    """Sets tensor-parallel overlap: off, with a warning, where it cannot work."""
    is_on = bool(user.tp_comm_overlap)
    obstacle = _tensor_parallel_obstacle(model) if is_on else None
    if obstacle:
        logger.warning("Disabling tensor parallel communication overlap due to %s.", obstacle)
        is_on = False
    if is_on and user.tp_comm_overlap_cfg is None:
        logger.warning("tp_comm_overlap: no configuration is given, Transformer Engine's is used.")
    settings = user.tp_comm_overlap_cfg
    if is_dataclass(settings):  # Transformer Engine takes a dict without the entries that are None
        settings = {name: value for name, value in asdict(settings).items() if value is not None}
    return {
        "tp_comm_overlap": is_on,
        "tp_comm_overlap_cfg": settings if is_on else None,
        "tp_comm_bootstrap_backend": user.tp_comm_bootstrap_backend,
    }


def _tensor_parallel_obstacle(model: Any) -> str | None:
    if option(model, "tensor_model_parallel_size") < 2:
        return "TP size < 2"
    if not option(model, "sequence_parallel"):
        return "sequence_parallel=False"
    if find_spec("transformer_engine") is None:
        return "TE not detected"
    return None


def _data_parallel(data_parallel_size: int, model: Any) -> dict[str, Any]:
    """Sets that gradients and parameters travel in buckets during backward, if ranks > 1."""
    is_parallel = data_parallel_size > 1
    has_chunks = option(model, "pipeline_model_parallel_size") > 1 and _num_chunks(model) > 1
    return {
        "bucket_size": _BUCKET_SIZE if is_parallel else None,
        "overlap_grad_reduce": is_parallel,
        "overlap_param_gather": is_parallel,
        "overlap_param_gather_with_optimizer_step": False,
        "align_param_gather": is_parallel and has_chunks,
    }


def _num_chunks(model: Any) -> int:
    return option(model, "virtual_pipeline_model_parallel_size") or 1


def _set_moe_a2a_overlap_overrides(recipe: Any, moe_a2a_overlap: bool = False) -> Any:
    """Turns on the overlap and the delayed weight gradients in `recipe`, and returns it.

    `recipe` has `model` and `comm_overlap`, created if None. False changes nothing. Checks are left
    to CommOverlapConfig.setup().
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
