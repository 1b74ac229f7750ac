# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own overlap of forward and backward, over Weft.

Its GPT model and its combined 1F1B run unchanged. On CPUs CUDA's streams are the calling thread:
what is tested is the order of calls, what is handed on, and what is freed too early, but for the
rows that Weft received, which cannot be freed there. On GPUs the streams are its own.
"""

import pytest
import torch
import torch.distributed as dist

from packages import skip_without
from ranks import device_of

skip_without("megatron", "megatron-core")  # not imported here: over_weft.py is to come first

VOCABULARY, LENGTH, MICRO_BATCHES = 32, 6, 3


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
    import over_weft

    shape = over_weft.Shape(vocabulary=VOCABULARY, length=LENGTH)
    woven_too = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
    model = over_weft.make_gpt(num_ranks, backend, shape, **woven_too).to(device)
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
