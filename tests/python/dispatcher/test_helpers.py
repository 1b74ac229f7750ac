# SPDX-License-Identifier: Apache-2.0
"""Capacity, padding and choices as flags, against loops."""

from types import SimpleNamespace

import pytest
import torch

from weft.dispatcher import (
    fused_indices_to_multihot,
    get_align_size_for_quantization,
    get_capacity,
    indices_to_multihot,
    pad_routing_map,
    skip_routed_expert_padding,
)
from weft.dispatcher.manager import chosen_experts


def test_capacity_is_rounded_up():
    assert get_capacity(32, 8, 1.0) == 4
    assert get_capacity(33, 8, 1.0) == 5
    assert get_capacity(32, 8, 0.5) == 2
    assert get_capacity(8, 8, 0.5, min_capacity=4) == 4
    assert get_capacity(0, 8, 2.0) == 0


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("num_tokens", [0, 5, 40])
def test_map_is_padded_with_its_first_clear_entries(multiple, num_tokens):
    given = torch.rand(num_tokens, 6, generator=torch.Generator().manual_seed(2)) < 0.3
    given[:, 0] = False
    padded = given.clone()
    assert pad_routing_map(padded, multiple) is padded
    assert torch.equal(pad_routing_map(given.int(), multiple), padded.int())
    for e in range(6):
        expected = given[:, e].clone()
        for t in range(num_tokens):
            if int(expected.sum()) % multiple and not expected[t]:
                expected[t] = True
        assert torch.equal(padded[:, e], expected)


@pytest.mark.parametrize(
    "settings,align",
    [
        ({}, 0),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp8": "e4m3", "fp8_recipe": SimpleNamespace(value="mxfp8")}, 32),
        ({"fp4": "e2m1"}, 128),
        ({"use_transformer_engine_op_fuser": True}, 256),
        ({"moe_use_grouped_tensor": True, "fp8": "hybrid"}, 256),
    ],
)
def test_alignment_follows_the_experts(settings, align):
    assert get_align_size_for_quantization(SimpleNamespace(**settings)) == align


@pytest.mark.parametrize(
    "settings,skips",
    [
        ({}, False),
        ({"moe_router_padding_for_quantization": True}, True),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}, True),
        ({"moe_token_dispatcher_type": "alltoall"}, False),
        ({"moe_token_dispatcher_type": "flex", "moe_use_grouped_tensor": True}, False),
        (
            {
                "moe_token_dispatcher_type": "flex",
                "moe_use_grouped_tensor": True,
                "moe_permute_fusion": True,
            },
            True,
        ),
    ],
)
def test_who_pads(settings, skips):
    assert skip_routed_expert_padding(SimpleNamespace(**settings)) is skips


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 128])
@pytest.mark.parametrize("num_choices,num_experts", [(1, 4), (2, 4), (4, 7), (6, 8), (8, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_become_flags(num_tokens, num_choices, num_experts, dtype):
    maker = torch.Generator().manual_seed(3)
    indices = torch.rand(num_tokens, num_experts, generator=maker).argsort(1)[:, :num_choices]
    indices[torch.rand(indices.shape, generator=maker) < 0.3] = -1
    probs = torch.rand(indices.shape, generator=maker).to(dtype).requires_grad_()
    routing_map, spread = indices_to_multihot(indices, probs, num_experts)
    assert routing_map.dtype == torch.bool and spread.dtype == dtype
    expected_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    expected = torch.zeros(num_tokens, num_experts, dtype=dtype)
    for t in range(num_tokens):
        for k in range(num_choices):
            if indices[t, k] >= 0:
                expected_map[t, indices[t, k]] = True
                expected[t, indices[t, k]] = probs[t, k].detach()
    assert torch.equal(routing_map, expected_map)
    assert torch.equal(spread, expected)
    grad = torch.rand(spread.shape, generator=maker).to(dtype)
    spread.backward(grad)
    for t in range(num_tokens):
        for k in range(num_choices):
            e = int(indices[t, k])
            assert probs.grad[t, k] == (grad[t, e] if e >= 0 else 0)


@pytest.mark.parametrize("index", [4, 5])
def test_an_expert_that_there_is_not_is_told(index):
    """The one behind the last like any other; what -1 stands beside cannot reach a flag."""
    with pytest.raises(RuntimeError, match=f"index {index} is out of bounds"):
        indices_to_multihot(torch.tensor([[0, index]]), torch.ones(1, 2), 4)
    wrong = torch.tensor([[0.5, float("nan")]])
    routing_map, spread = indices_to_multihot(torch.tensor([[3, -1]]), wrong, 4)
    assert routing_map.tolist() == [[False, False, False, True]]
    assert spread.tolist() == [[0, 0, 0, 0.5]]


def test_the_fused_name_is_the_same_function():
    assert fused_indices_to_multihot is indices_to_multihot


def test_the_map_decides_about_choices():
    probs = torch.tensor([[0.0, 0.7, 0.3, 0.9], [0.5, 0.5, 0.5, 0.5], [0.4, 0.0, 0.0, 0.0]])
    routing_map = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    probs.requires_grad_()
    token_probs, indices = chosen_experts(routing_map, probs, 2)
    assert indices.tolist() == [[1, 0], [2, -1], [-1, -1]]
    assert token_probs.tolist() == [[pytest.approx(0.7), 0.0], [0.5, 0.0], [0.0, 0.0]]
    token_probs.sum().backward()
    assert torch.equal(probs.grad, routing_map.float())


def test_without_a_map_zero_is_no_choice():
    probs = torch.tensor([[0.0, 0.7, 0.0], [0.0, 0.0, 0.0]])
    token_probs, indices = chosen_experts(None, probs, 2)
    assert indices[0].tolist() == [1, -1] and indices[1].tolist() == [-1, -1]
    assert chosen_experts(None, probs, 8)[1].shape == (2, 3)
