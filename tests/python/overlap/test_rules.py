# SPDX-License-Identifier: Apache-2.0
"""Settings and arguments that a plan refuses."""

import pytest
import torch

from weft.config import OverlapModelConfig
from weft.overlap import (
    ModelChunk,
    TransformerLayer,
    TransformerModelChunkSchedulePlan,
    check_overlap,
)


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"recompute_granularity": "full"}, "disable full recomputation"),
        ({"recompute_method": "uniform"}, "disable recomputation method"),
        ({"recompute_num_layers": 2}, "recompute_num_layers must be None"),
        ({"recompute_modules": ["moe"]}, "disable moe in recompute_modules"),
        ({"moe_shared_expert_overlap": True}, "disable moe_shared_expert_overlap"),
    ],
)
def test_refused(settings, text):
    with pytest.raises(AssertionError, match=text):
        check_overlap(OverlapModelConfig(**settings))
    model = ModelChunk([torch.nn.Identity()], config=OverlapModelConfig(**settings))
    with pytest.raises(AssertionError, match=text):
        model.build_schedule_plan(None)


def test_accepted():
    modules = ["core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts"]
    check_overlap(OverlapModelConfig(recompute_granularity="selective", recompute_modules=modules))
    check_overlap(object())  # a configuration of other settings


def test_layer():
    one = torch.nn.Identity()
    for wrong in ({}, {"mlp": one, "moe": one}, {"mlp": one, "shared_experts": one}):
        with pytest.raises(ValueError, match="expected mlp, or moe"):
            TransformerLayer(one, **wrong)
    with pytest.raises(ValueError, match="everything"):
        TransformerLayer(one, mlp=one, recompute_modules=["everything"])
    with pytest.raises(AssertionError, match="disable moe"):
        TransformerLayer(one, mlp=one, recompute_modules=["moe"])


def test_arguments_without_a_use():
    model = ModelChunk([TransformerLayer(torch.nn.Identity(), mlp=torch.nn.Identity())])
    with pytest.raises(NotImplementedError, match="packed_seq_params"):
        model.build_schedule_plan(None, packed_seq_params=1)
    with pytest.raises(NotImplementedError, match="extra_block_kwargs"):
        TransformerModelChunkSchedulePlan(model, *[None] * 6, {"a": 1})
    mask = torch.ones(2)
    unused = (None, None, {}, False, None)  # inference_context to inference_params
    for plan in (
        model.build_schedule_plan(*[None] * 5, *unused, mask, None, output_processor=None),
        TransformerModelChunkSchedulePlan(model, *[None] * 6, {}, False, mask, name="one"),
    ):
        assert plan.state.loss_mask is mask
    with pytest.raises(ValueError, match="no embedding"):
        model(None)
