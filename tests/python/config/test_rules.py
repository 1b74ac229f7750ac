# SPDX-License-Identifier: Apache-2.0
"""Each rule: the text on violation, and the nearest configuration that passes.

A row is as in rule_cases.
"""

from enum import Enum

import pytest
from rule_cases import COMMON_RULES, NEEDS_FUSION, NEEDS_TE, OVERLAP

from weft.config import (
    OverlapModelConfig,
    validate_graph_replay,
    validate_model_overlap,
    validate_overlap_arguments,
    validate_overlap_schedule,
)

STAGED = "overlap_dispatch_backward_with_experts_wgrad"
TE_GRAPH = {"cuda_graph_impl": "transformer_engine"}
NCCLEP = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "ncclep",
    "offload_modules": ["moe_act", "expert_fc1"],
}

MODEL_RULES = [
    *COMMON_RULES,
    (
        "3",
        {"expert_model_parallel_size": 1},
        {"expert_model_parallel_size": 2},
        f"{OVERLAP} is only supported with expert model parallelism",
    ),
    (
        "5",
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_token_dispatcher_type": "flex"},
        f"{OVERLAP} is supported with alltoall/flex token dispatcher",
    ),
    (
        "10",
        {"bf16": False},
        {"fp16": True},
        f"{OVERLAP} is only supported with bf16 or fp16 model",
    ),
    (
        "13",
        NCCLEP,
        {"offload_modules": ["moe_act"]},
        f"{OVERLAP} with ncclep does not support offloading 'expert_fc1': ",
    ),
    (
        "13",
        NCCLEP,
        {"moe_flex_dispatcher_backend": "hybridep"},
        f"{OVERLAP} with ncclep does not support offloading 'expert_fc1': ",
    ),
    (
        "13",
        NCCLEP,
        {"moe_token_dispatcher_type": "alltoall"},
        f"{OVERLAP} with ncclep does not support offloading 'expert_fc1': ",
    ),
    (
        "13",
        NCCLEP,
        {"offload_modules": None},
        f"{OVERLAP} with ncclep does not support offloading 'expert_fc1': ",
    ),
    (
        "14",
        {**TE_GRAPH, "cuda_graph_modules": ["attn", "moe"]},
        {"cuda_graph_modules": ["attn", "moe_router"]},
        f"CUDA graph scope on moe and mlp is not supported with {OVERLAP}",
    ),
    (
        "14",
        {**TE_GRAPH, "cuda_graph_scope": "attn,mlp"},
        {"cuda_graph_impl": "full_iteration"},
        f"CUDA graph scope on moe and mlp is not supported with {OVERLAP}",
    ),
    (
        "15",
        {OVERLAP: False, "delay_wgrad_compute": True},
        {OVERLAP: True},
        f"{OVERLAP} must be enabled when enabling delay_wgrad_compute",
    ),
    (
        "23",
        {STAGED: True},
        {OVERLAP: False},
        f"{OVERLAP} must be disabled when enabling {STAGED}",
    ),
    (
        "24",
        {OVERLAP: False, "ep_overlap_early_attn_memory_release": True},
        {OVERLAP: True},
        f"{OVERLAP} must be enabled when enabling ep_overlap_early_attn_memory_release",
    ),
]


def text_of(function, *arguments):
    with pytest.raises(AssertionError) as caught:
        function(*arguments)
    return str(caught.value)


def is_text(found, text):
    """A text of the reference that goes on after its colon is compared up to there."""
    return found.startswith(text) if text.endswith(": ") else found == text


@pytest.mark.parametrize("number, wrong, mended, text", MODEL_RULES)
def test_model(model, installed, number, wrong, mended, text):
    assert is_text(text_of(validate_model_overlap, model(**wrong)), text)
    validate_model_overlap(model(**{**wrong, **mended}))


def test_model_rules_of_the_overlap_hold_only_with_the_overlap(installed):
    installed(torch_version="2.5.1")
    validate_model_overlap(OverlapModelConfig(moe_shared_expert_overlap=True))


def test_attributes_that_are_absent_have_defaults(installed):
    class Bare:
        overlap_moe_expert_parallel_comm = True
        expert_model_parallel_size = 2
        moe_token_dispatcher_type = "flex"
        bf16 = True

    validate_model_overlap(Bare())
    Bare.expert_model_parallel_size = 1
    assert "expert model parallelism" in text_of(validate_model_overlap, Bare())


def test_rule_1(model, installed):
    for old in ("2.5.1", "2.6.0a0+git1"):
        installed(torch_version=old)
        assert text_of(validate_model_overlap, model()) == (
            "A2A Overlap encounters hang issue with torch version < 2.6.0"
        )
    for new in ("2.6.0", "2.6.0+cu124", "2.10.0"):
        installed(torch_version=new)
        validate_model_overlap(model())


def test_rule_13_with_offloading_switched_off(model, installed):
    config = model(**NCCLEP)
    config.fine_grained_activation_offloading = False
    validate_model_overlap(config)
    config.fine_grained_activation_offloading = True
    assert "'expert_fc1'" in text_of(validate_model_overlap, config)


def test_rule_14_with_enumerators(model, installed):
    scope = Enum("CudaGraphScope", ["attn", "moe"])
    validate_model_overlap(model(**TE_GRAPH, cuda_graph_scope=scope.attn))
    for value in (scope.moe, [scope.attn, scope.moe], [str(scope.moe)]):
        broken = model(**TE_GRAPH, cuda_graph_scope=value)
        assert "moe and mlp" in text_of(validate_model_overlap, broken)


def test_rule_16(model, installed):
    graph = model(delay_wgrad_compute=True, **TE_GRAPH)
    installed(te="2.9.0")
    assert text_of(validate_model_overlap, graph) == (
        "TE version >= 2.10.0 is required for delay_wgrad_compute with partial cuda graph"
    )
    validate_model_overlap(model(delay_wgrad_compute=True))
    validate_model_overlap(model(**TE_GRAPH))
    installed(te="2.10.0")
    validate_model_overlap(graph)


def test_rule_23(model, installed):
    alone = model(**{OVERLAP: False, STAGED: True})
    installed(te="2.2.0")
    assert text_of(validate_model_overlap, alone) == f"TE version >= 2.3.0 is required for {STAGED}"
    installed(te="2.3.0")
    validate_model_overlap(alone)


def test_rule_23_with_delayed_gradients(model, installed):
    # Rule 15 comes first in a whole configuration, so that the third text needs the rule itself.
    from weft.config.rules import staged_dispatch_backward

    both = model(**{OVERLAP: False, STAGED: True, "delay_wgrad_compute": True})
    assert text_of(staged_dispatch_backward, both) == (
        f"delay_wgrad_compute must be disabled when enabling {STAGED}"
    )
    both.delay_wgrad_compute = False
    staged_dispatch_backward(both)


REDUCE = {"overlap_grad_reduce": True}
GRAPHED = {**REDUCE, "cuda_graph_modules": ["attn"]}
ROUTER = {
    **REDUCE,
    "cuda_graph_modules": ["moe_router"],
    "moe_shared_expert_intermediate_size": 64,
}

# The fourth column is Transformer Engine's version.
ARGUMENT_RULES = [
    (
        "17",
        {"transformer_impl": "local"},
        {"transformer_impl": "transformer_engine"},
        "2.12.0",
        "Delaying wgrad compute is only supported with transformer_engine implementation",
    ),
    (
        "18",
        REDUCE,
        {"overlap_grad_reduce": False},
        "2.7.0",
        "overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling delay_wgrad_compute",
    ),
    (
        "19",
        {"gradient_accumulation_fusion": False},
        {"gradient_accumulation_fusion": True},
        "2.6.0",
        "disabling gradient_accumulation_fusion is only supported with TE >= 2.7.0 "
        "when enabling delay_wgrad_compute",
    ),
    ("20", GRAPHED, {"cuda_graph_modules": ["moe_router"]}, "2.11.0", NEEDS_TE),
    ("20", GRAPHED, {"overlap_grad_reduce": False}, "2.11.0", NEEDS_TE),
    ("20", ROUTER, {"moe_shared_expert_intermediate_size": None}, "2.11.0", NEEDS_TE),
    ("20", ROUTER, {"moe_shared_expert_overlap": True}, "2.11.0", NEEDS_TE),
    ("20", ROUTER, {"cuda_graph_modules": ["moe_preprocess"]}, "2.11.0", NEEDS_TE),
    (
        "21",
        {**GRAPHED, "gradient_accumulation_fusion": False},
        {"gradient_accumulation_fusion": True},
        "2.12.0",
        NEEDS_FUSION,
    ),
    (
        "22",
        {**GRAPHED, "add_bias_linear": True},
        {"add_bias_linear": False},
        "2.12.0",
        "CUDA graph with delay_wgrad_compute doesn't support attn bias for now.",
    ),
    (
        "22",
        {**GRAPHED, "add_qkv_bias": True},
        {"cuda_graph_modules": ["moe_router"]},
        "2.12.0",
        "CUDA graph with delay_wgrad_compute doesn't support attn bias for now.",
    ),
]


@pytest.mark.parametrize("number, wrong, mended, te, text", ARGUMENT_RULES)
def test_arguments(model, installed, number, wrong, mended, te, text):
    installed(te=te)
    found = text_of(validate_overlap_arguments, model(delay_wgrad_compute=True, **wrong))
    assert found.startswith(text) if text is NEEDS_FUSION else found == text
    validate_overlap_arguments(model(delay_wgrad_compute=True, **{**wrong, **mended}))
    validate_overlap_arguments(model(delay_wgrad_compute=False, **wrong))


@pytest.mark.parametrize(
    "settings, te",
    [(REDUCE, "2.8.0"), ({"gradient_accumulation_fusion": False}, "2.7.0"), (GRAPHED, "2.12.0")],
)
def test_arguments_at_the_lowest_version(model, installed, settings, te):
    installed(te=te)
    validate_overlap_arguments(model(delay_wgrad_compute=True, **settings))
    installed(te=None)
    text_of(validate_overlap_arguments, model(delay_wgrad_compute=True, **settings))


def test_rule_25():
    assert text_of(validate_overlap_schedule, False) == (
        f"checkpoint_activations_microbatch is not supported for {OVERLAP}"
    )
    validate_overlap_schedule(None)


def test_rule_26(model):
    assert text_of(validate_graph_replay, model(), True) == (
        "EP overlap must be disabled when CUDA graph captures the whole MLP/MoE part."
    )
    validate_graph_replay(model(), False)
    validate_graph_replay(model(**{OVERLAP: False}), True)
