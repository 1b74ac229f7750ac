# SPDX-License-Identifier: Apache-2.0
"""The rules of weft.config on Megatron-Core's own configurations, as they come from PyPI."""

from dataclasses import fields

import pytest
import torch

from packages import skip_without

skip_without("megatron", "megatron-core")

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "bf16": True,
    "add_bias_linear": False,
}


def set_up(rank, num_ranks, group, changes):
    """The overlap settings that setup() leaves in Megatron's configuration and in Weft's, or the
    texts with which it refuses them; and what data parallelism got."""
    import over_weft  # noqa: F401
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from weft.config import CommOverlapConfig, OverlapModelConfig

    theirs = TransformerConfig(**MODEL | changes)
    shared = [f.name for f in fields(OverlapModelConfig) if hasattr(theirs, f.name)]
    ours = OverlapModelConfig(**{name: getattr(theirs, name) for name in shared})
    found = []
    for model in (theirs, ours):
        optimizer = OptimizerConfig(use_distributed_optimizer=True)
        data = DistributedDataParallelConfig(use_distributed_optimizer=True)
        user = CommOverlapConfig(
            tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True, data_parallel_size=2
        )
        try:
            user.setup(model, optimizer, data)
        except AssertionError as error:
            found.append(str(error))
            continue
        values = {name: getattr(model, name) for name in shared}
        found.append((values, data.overlap_grad_reduce, optimizer.overlap_param_gather))
    return found


PIPELINE = {
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("changes", [{}, PIPELINE])
def test_setup_writes_the_same_into_both(ranks, changes):
    ((theirs, ours),) = ranks(set_up, 1, changes)
    assert theirs == ours
    values, *_ = theirs
    assert values["overlap_moe_expert_parallel_comm"] is True


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"expert_model_parallel_size": 1}, "expert_model_parallel_size > 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "'alltoall' or 'flex', but got allgather"),
        ({"bf16": False}, "when using bf16 or fp16 models"),
    ],
)
def test_setup_refuses_the_same(ranks, changes, text):
    ((theirs, ours),) = ranks(set_up, 1, changes)
    assert theirs == ours and text in theirs
