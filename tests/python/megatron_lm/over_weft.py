# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core with deep_ep of Weft, as the page docs/megatron.md says: before it is imported."""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

import weft.compat
from ranks import after_call

weft.compat.install("deep_ep", force=True)
try:
    import megatron.core.transformer.moe.moe_layer
finally:
    weft.compat.uninstall()  # it has what it asked for
# A name that it lacks without Transformer Engine.
megatron.core.transformer.moe.moe_utils.te_general_gemm = None


class Shape(NamedTuple):
    """A GPT with experts; length: of its positions."""

    layers: int = 2
    hidden: int = 32
    heads: int = 2
    width: int = 128
    experts: int = 4
    topk: int = 2
    vocabulary: int = 64
    length: int = 16


def forget_buffer_after_call() -> None:
    """Megatron-Core keeps the buffer of the first process group that it meets."""
    from megatron.core.transformer.moe import fused_a2a

    after_call.append(fused_a2a.reset_hybrid_ep_buffer)


def replace(module: Any, name: str, value: Any) -> None:
    """Until the call of the rank ends."""
    after_call.append(partial(setattr, module, name, getattr(module, name)))
    setattr(module, name, value)


def replace_fused_a2a() -> None:
    """weft.fused_a2a in place of Megatron-Core's module, until the call of the rank ends."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    import weft.fused_a2a

    names = set(weft.fused_a2a.__all__) & vars(fused_a2a).keys() & vars(token_dispatcher).keys()
    for name in names:
        replace(token_dispatcher, name, vars(weft.fused_a2a)[name])


def split_norm(cls, config, hidden_size, eps=1e-5, **_):
    """A LayerNorm of parts of sequences, whose gradients Megatron-Core adds up over the parts. Its
    own wrapper of torch's refuses to be one."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def initialize_groups(config: Any) -> None:
    """Megatron-Core's groups, until the call of the rank ends: its process group may end then."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        )
        after_call.append(parallel_state.destroy_model_parallel)


def make_gpt(num_ranks: int, dispatcher: str, shape: Shape, attention=None, **settings):
    """Megatron-Core's GPT of its local specification, with its groups and each time the same
    weights. dispatcher: "alltoall", or a backend of "flex"; attention: a class in place of its
    core; settings go over those of here. Setting bf16 without params_dtype only passes rules."""
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    forget_buffer_after_call()
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # for dropout, of which there is none
    way = {"moe_token_dispatcher_type": dispatcher}
    if dispatcher != "alltoall":
        way = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": dispatcher}
    if dispatcher == "ncclep":
        replace_fused_a2a()
        way["moe_expert_rank_capacity_factor"] = float(num_ranks)  # all rows fit
    given = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.width,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": num_ranks,
        "add_bias_linear": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    config = TransformerConfig(**given | way | settings)
    if config.sequence_parallel:
        replace(WrappedTorchNorm, "__new__", split_norm)
    initialize_groups(config)
    config.bf16 = config.params_dtype == torch.bfloat16
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=shape.experts, moe_grouped_gemm=False
    )
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    torch.manual_seed(5)
    return gpt_model.GPTModel(config, spec, shape.vocabulary, shape.length)
