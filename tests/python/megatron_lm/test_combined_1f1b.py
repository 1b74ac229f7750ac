# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own overlap of forward and backward, over Weft.

Its GPT model and its combined 1F1B run unchanged. On CPUs CUDA's streams are the calling thread:
what is tested is the order of calls, what is handed on, and what is freed too early, but for the
rows that Weft received, which cannot be freed there. On GPUs the streams are its own.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from packages import skip_without
from ranks import device_of

skip_without("megatron", "megatron-core")  # not imported here: over_weft.py is to come first

VOCABULARY, LENGTH, MICRO_BATCHES = 32, 6, 3


def make_model(num_ranks, backend):
    import over_weft
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    over_weft.forget_buffer_after_call()
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # for dropout, of which there is none
    over_weft.initialize_groups(num_ranks)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        expert_model_parallel_size=num_ranks,
        overlap_moe_expert_parallel_comm=True,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=True,
    )
    config.bf16 = False  # the rules are through
    spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    torch.manual_seed(5)
    return gpt_model.GPTModel(config, spec, VOCABULARY, LENGTH)


def micro_batches(rank, device):
    maker = torch.Generator().manual_seed(rank)
    positions = torch.arange(LENGTH, device=device).unsqueeze(0)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    texts = [torch.randint(VOCABULARY, (1, LENGTH), generator=maker) for _ in range(MICRO_BATCHES)]
    return [(text.to(device), positions, mask) for text in texts]


def gradients(model):
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to("cpu", copy=True) for name, grad in grads.items()}


def one_after_the_other(model, batches):
    losses = []
    for batch in batches:
        loss = model(*batch, labels=batch[0])
        loss.backward(torch.ones_like(loss))
        losses.append(loss.detach())
    return losses


def woven(model, batches):
    """The forward of each micro-batch with the backward of the one before it."""
    from megatron.core.models.common import model_chunk_schedule_plan
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams()
    run = model_chunk_schedule_plan.TransformerModelChunkSchedulePlan.run
    losses, last = [], None
    for batch in batches:
        plan = model.build_schedule_plan(*batch, labels=batch[0])
        grad = None if last is None else torch.ones_like(losses[-1])
        losses.append(run(plan, last, b_grad=grad).detach())
        last = plan
    run(None, last, b_grad=torch.ones_like(losses[-1]))
    return losses


def both_ways(rank, num_ranks, backend, device):
    model = make_model(num_ranks, backend).to(device)
    batches = micro_batches(rank, device)
    for schedule in (one_after_the_other, woven):
        model.zero_grad()
        losses = schedule(model, batches)
        if device.type == "cuda":
            torch.cuda.synchronize()  # it ends on a stream of its own
        yield [loss.cpu() for loss in losses], gradients(model)


def train(rank, num_ranks, group, backend):
    """Losses and gradients of both."""
    from host_streams import host_streams

    device, streams = device_of(rank), host_streams()
    if device.type == "cuda":
        streams = torch._dynamo.config.patch(disable=True)
    with streams:
        found = list(both_ways(rank, num_ranks, backend, device))
    dist.barrier()
    return found


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_losses_and_gradients_are_those_without_overlap(ranks, backend):
    for (losses, grads), (woven_losses, woven_grads) in ranks(train, 2, backend):
        assert len(losses) == MICRO_BATCHES and all(loss.isfinite().all() for loss in losses)
        assert all(torch.equal(a, b) for a, b in zip(losses, woven_losses, strict=True))
        assert any(".experts." in name for name in grads)
        assert grads.keys() == woven_grads.keys()
        for name, grad in grads.items():
            assert torch.equal(woven_grads[name], grad), name
