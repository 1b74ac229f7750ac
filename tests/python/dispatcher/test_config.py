# SPDX-License-Identifier: Apache-2.0
"""Settings that go together, and settings that do not."""

import warnings

import pytest

from weft.dispatcher import DispatcherConfig, TokenDispatcherConfig
from weft.dispatcher.config import num_sms, option

FLEX = {"moe_token_dispatcher_type": "flex"}
HYBRID = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
NCCL = {**FLEX, "moe_flex_dispatcher_backend": "ncclep"}
FUSER = {"use_transformer_engine_op_fuser": True}
GEMM = {"moe_grouped_gemm": True}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        FLEX,
        {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True},
        {**FLEX, "moe_expert_capacity_factor": 1.0},
        {**HYBRID, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {**HYBRID, **FUSER, "moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True},
        {**HYBRID, "moe_use_grouped_tensor": True, "moe_expert_rank_capacity_factor": 1.5},
        {**HYBRID, "moe_experts_ignore_unused_rows": True, "moe_expert_rank_capacity_factor": 1.5},
        {**NCCL, **FUSER, **GEMM, "moe_dispatch_fwd_dtype": "mxfp8"},
        {**NCCL, "moe_expert_rank_capacity_factor": 1.0, "moe_ncclep_static_shape": False},
        {**FLEX, "moe_flex_dispatcher_backend": "uccl_ep"},
        {**FLEX, "moe_router_padding_for_quantization": True, "fp8": "hybrid"},
        {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": ["aux_loss", "none"]},
    ],
)
def test_good_settings_pass(settings):
    config = DispatcherConfig(**settings)
    assert config.validate() is config


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"moe_token_dispatcher_type": "ring"}, "'ring' is unknown"),
        ({**FLEX, "moe_flex_dispatcher_backend": "ring"}, "Invalid backend: ring"),
        (
            {"moe_enable_deepep": True},
            "DeepEP backend is only supported with flex token dispatcher.",
        ),
        (
            {**HYBRID, "moe_enable_deepep": True},
            "Only one backend is supported for flex token dispatcher.",
        ),
        ({"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 24}, "disagree"),
        ({"moe_pad_expert_input_to_capacity": True}, "no capacity"),
        (
            {
                **FLEX,
                "moe_pad_expert_input_to_capacity": True,
                "moe_expert_capacity_factor": 1.0,
            },
            "no fixed",
        ),
        (
            {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"},
            "'sinkhorn' does not drop",
        ),
        ({**FLEX, "moe_expert_rank_capacity_factor": 1.0}, "row budget"),
        ({"moe_expert_rank_capacity_factor": 1.0}, "row budget"),
        ({**HYBRID, "moe_expert_rank_capacity_factor": 1.0}, "ignore unused rows"),
        ({**FLEX, "moe_dispatch_fwd_dtype": "mxfp8"}, "mxfp8 needs"),
        ({**FLEX, "moe_combine_bwd_dtype": "fp4"}, "'fp4' is unknown"),
        ({"moe_flex_dispatcher_backend": "ncclep"}, "ncclep: needs"),
        ({**NCCL, "moe_use_grouped_tensor": True}, "op_fuser"),
        ({**NCCL, "moe_expert_capacity_factor": 1.0}, "not supported"),
        ({**NCCL, "moe_ncclep_zero_copy": True}, "moe_ncclep_zero_copy"),
        ({**NCCL, "moe_expert_rank_capacity_factor": 1.0}, "moe_grouped_gemm"),
        ({**FLEX, "moe_router_padding_for_quantization": True}, "nothing is quantised"),
        (
            {"moe_router_padding_for_quantization": True, "fp8": "hybrid"},
            "allgather dispatcher does not",
        ),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
        ({"variable_seq_lengths": True}, "equal lengths"),
        ({**FLEX, "moe_paged_stash": True}, "needs moe_expert_rank"),
        (
            {
                **HYBRID,
                **FUSER,
                "moe_expert_rank_capacity_factor": 1.0,
                "moe_paged_stash": True,
                "cpu_offloading": True,
            },
            "cpu_offloading",
        ),
        (
            {
                **HYBRID,
                **FUSER,
                "moe_expert_rank_capacity_factor": 1.0,
                "moe_paged_stash": True,
                "offload_modules": ["moe_act", "attn"],
            },
            "moe_act",
        ),
        ({**FLEX, "sequence_packing_scheduler": "random"}, "'random' is unknown"),
    ],
)
def test_bad_settings_are_named(settings, text):
    with pytest.raises(ValueError, match=text):
        DispatcherConfig(**settings).validate()


def test_sequence_packing_needs_variable_lengths():
    config = DispatcherConfig(**FLEX, sequence_packing_scheduler="dp_balanced").validate()
    assert config.variable_seq_lengths
    with pytest.raises(AssertionError, match=r"\('alltoall', 'flex'\), got 'allgather'"):
        DispatcherConfig(sequence_packing_scheduler="dp_balanced").validate()


def test_deprecated_settings_move_with_a_warning():
    config = DispatcherConfig(**FLEX, moe_deepep_num_sms=24)
    with pytest.warns(UserWarning, match="moe_deepep_num_sms is deprecated"):
        config.validate()
    assert config.moe_flex_dispatcher_num_sms == 24
    with pytest.warns(UserWarning, match="moe_enable_deepep is deprecated"):
        DispatcherConfig(**FLEX, moe_enable_deepep=True).validate()


def test_a_negative_capacity_factor_is_none():
    config = DispatcherConfig(moe_expert_capacity_factor=-1.0).validate()
    assert config.moe_expert_capacity_factor is None


def test_missing_attributes_have_defaults():
    assert option(object(), "moe_router_topk") == 2
    assert option(object(), "moe_hybridep_num_sms_preprocessing") == 108
    assert num_sms(object(), "moe_deepep_num_sms") is None
    assert num_sms(TokenDispatcherConfig(), "moe_deepep_num_sms") == 20
    assert num_sms(TokenDispatcherConfig(), "moe_hybridep_num_sms") == 24
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DispatcherConfig().validate()
