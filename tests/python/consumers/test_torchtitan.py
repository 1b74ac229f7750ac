# SPDX-License-Identifier: Apache-2.0
"""torchtitan's expert parallelism over DeepEP, as it comes from PyPI, over Weft's ElasticBuffer:
its operators and their gradients run unchanged. Those for CUDA are given to CPU tensors, too."""

import pytest
import torch
import torch.distributed as dist

import packages
from ranks import device_of

PACKAGE = "torchtitan 0.3.0"
HIDDEN, LOCAL, TOPK, ROUNDS = 256, 2, 3, 3


def modules():
    from loading import load

    (module,) = load(
        packages.wheel(PACKAGE), {}, ["torchtitan.distributed.deepep.deepep"], ["deep_ep"]
    )
    if not torch.cuda.is_available() and not getattr(module, "is_on_host", False):
        module._lib.impl("dispatch", module._dispatch_op_impl, "CPU")
        module._lib.impl("combine", module._combine_op_impl, "CPU")
        module.is_on_host = True
    return module


class Batch:
    """Tokens, choices and scores for which sums are exact."""

    def __init__(self, rank, num_ranks, seed, tokens):
        maker = torch.Generator().manual_seed(100 * seed + rank)
        device = device_of(rank)
        count = tokens[rank]
        self.num_experts = LOCAL * num_ranks
        x = torch.randint(-2, 3, (count, HIDDEN), generator=maker).to(torch.bfloat16)
        ids = torch.rand(count, self.num_experts, generator=maker).topk(TOPK).indices
        scores = torch.tensor([1.0, 0.5, 0.25]).expand(count, -1).contiguous()
        scores[torch.rand(count, TOPK, generator=maker) < 0.1] = 0  # no choice
        grad = torch.randint(-2, 3, (count, HIDDEN), generator=maker).to(torch.bfloat16)
        self.x, self.ids, self.scores, self.grad = (
            one.to(device) for one in (x, ids, scores, grad)
        )


def factors(experts):
    return (experts % 3 + 1).to(torch.bfloat16)


def layer(module, batch, rank, most, **options):
    """torchtitan's dispatcher does these calls; experts multiply by a number of theirs."""
    x, scores = batch.x.clone().requires_grad_(), batch.scores.clone().requires_grad_()
    rows, counts, state = module.dispatch_tokens(
        x, batch.ids, scores, LOCAL, batch.num_experts, num_tokens_per_rank=most, **options
    )
    used = int(counts.sum())
    experts = torch.arange(LOCAL, device=x.device).repeat_interleave(counts.long())
    computed = torch.zeros_like(rows)
    computed[:used] = rows[:used] * factors(rank * LOCAL + experts).unsqueeze(1)
    out = module.combine_tokens(computed, state)
    module.sync_combine()
    return x, scores, out, counts


def run(rank, num_ranks, group, tokens):
    module, most = modules(), max(tokens)
    module._buffer = None  # of another group
    module.get_buffer(group, hidden=HIDDEN, num_max_tokens_per_rank=most, num_topk=TOPK)
    for seed in range(ROUNDS):
        batch = Batch(rank, num_ranks, seed, tokens)
        by = factors(batch.ids)
        want = (batch.x.unsqueeze(1) * (batch.scores * by).unsqueeze(2)).sum(1)
        x, scores, out, counts = layer(module, batch, rank, most)
        everybody = [Batch(other, num_ranks, seed, tokens) for other in range(num_ranks)]
        for place, count in enumerate(counts.tolist()):
            chosen = [(one.ids == rank * LOCAL + place) & (one.scores != 0) for one in everybody]
            assert count == sum(int(one.sum()) for one in chosen)
        assert torch.equal(out.float(), want.float())
        out.backward(batch.grad)
        grad = batch.grad.float() * (batch.scores * by).sum(1, keepdim=True)
        assert torch.equal(x.grad.float(), grad)
        dots = (batch.x.float() * batch.grad.float()).sum(1, keepdim=True) * by
        dots = dots.masked_fill(batch.scores == 0, 0)
        assert torch.allclose(scores.grad, dots.float(), rtol=0.02, atol=1.0)
        with torch.no_grad():  # inference: the layout of fixed size
            again = layer(module, batch, rank, most, cudagraphable=True)[2]
        assert torch.equal(again.float(), want.float())
    assert not module._handle_cache
    module._buffer = None
    dist.barrier(group)


@pytest.mark.parametrize("tokens", [(16, 16), (16, 5), (7, 0)], ids=str)
def test_sums_and_gradients_are_those_of_a_dense_layer(ranks, tokens):
    packages.wheel(PACKAGE)
    ranks(run, 2, tokens)
