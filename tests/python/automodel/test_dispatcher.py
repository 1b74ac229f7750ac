# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's own token dispatcher, as it comes from PyPI, over Weft, and Weft's in its place:
what docs/automodel.md promises.

Automodel's runs unchanged, on GPUs where there are any. Expert e multiplies its rows by 1 + e.
"""

import automodel_modules as automodel
import pytest
import torch

from ranks import device_of

HIDDEN, EXPERTS, TOPK = 64, 8, 3
# Of sums that nearly cancel; a GPU adds up in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-3 if torch.cuda.is_available() else 1e-4}


def inputs(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H]; experts and probabilities [T, K]."""
    maker = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=maker)
    scores = torch.randn(num_tokens, EXPERTS, generator=maker).softmax(-1)
    probs, experts = scores.topk(TOPK, dim=-1)
    return x, experts, probs


def expected(rank: int, num_tokens: int) -> list[torch.Tensor]:
    """Output, gradients of x and of the probabilities, where the output's is all 1, 2, 3, ..."""
    x, experts, probs = inputs(rank, num_tokens)
    x.requires_grad_()
    probs.requires_grad_()
    out = x * (probs * (1 + experts)).sum(-1, keepdim=True)
    out.backward(torch.arange(1.0, 1 + HIDDEN).expand(out.shape))
    return [out.detach(), x.grad, probs.grad]


def make(module, group, backend, **settings):
    rank, num_ranks = group.rank(), group.size()
    local = EXPERTS // num_ranks
    own = list(range(rank * local, (rank + 1) * local))
    config = module.TokenDispatcherConfig(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_flex_dispatcher_backend=backend,
        moe_share_token_dispatcher=False,
        **settings,
    )
    dispatcher = module.MoEFlexTokenDispatcher(
        num_local_experts=local, local_expert_indices=own, config=config, ep_group=group
    )
    return dispatcher, own


def layer(dispatcher, own, x, experts, probs):
    rows, counts, row_probs = dispatcher.token_permutation2(x, x.size(0), probs, experts)
    factors = torch.repeat_interleave(1.0 + torch.tensor(own), counts.cpu()).to(rows.device)
    rows = rows * (factors * row_probs).unsqueeze(-1)
    return dispatcher.token_unpermutation(rows)


def run_dispatcher(rank, num_ranks, group, whose, backend, num_tokens, settings):
    _, module = automodel.modules(whose)
    dispatcher, own = make(module, group, backend, **settings)
    x, experts, probs = (t.to(device_of(rank)) for t in inputs(rank, num_tokens[rank]))
    x.requires_grad_()
    probs.requires_grad_()
    with automodel.without_gpu():
        out = layer(dispatcher, own, x, experts, probs)
        out.backward(torch.arange(1.0, 1 + HIDDEN, device=x.device).expand(out.shape))
    return [tensor.detach().cpu() for tensor in (out, x.grad, probs.grad)]


CASES = [
    ("deepep", {}),
    ("uccl_ep", {}),
    ("hybridep", {}),
    ("hybridep", {"moe_hybridep_compact_routing": True}),
    ("hybridep", {"moe_hybridep_permute_fusion": True, "moe_hybridep_num_sms_preprocessing": 8}),
]


@pytest.mark.parametrize("whose", automodel.WHOSE)
@pytest.mark.parametrize("backend, settings", CASES)
@pytest.mark.parametrize("num_tokens", [[5, 8], [0, 3]])
def test_dispatcher_gives_what_dense_experts_give(ranks, whose, num_tokens, backend, settings):
    found = ranks(run_dispatcher, 2, whose, backend, num_tokens, settings)
    for rank, tensors in enumerate(found):
        for tensor, wanted in zip(tensors, expected(rank, num_tokens[rank]), strict=True):
            torch.testing.assert_close(tensor, wanted, **TOLERANCE)


def run_static_routing(rank, num_ranks, group, whose):
    """With static routing only the first dispatch asks how many rows there are."""
    fused_a2a, module = automodel.modules(whose)
    dispatcher, own = make(module, group, "hybridep", moe_benchmark_static_routing=True)
    asked = []
    real = fused_a2a.HybridEPBuffer.dispatch_with_permute

    def noted(buffer, **options):
        asked.append(not options["non_blocking"])
        return real(buffer, **options)

    x, experts, probs = (tensor.to(device_of(rank)) for tensor in inputs(rank, 6))
    fused_a2a.HybridEPBuffer.dispatch_with_permute = noted
    try:
        with automodel.without_gpu():
            outs = [layer(dispatcher, own, x, experts, probs) for _ in range(3)]
    finally:
        fused_a2a.HybridEPBuffer.dispatch_with_permute = real
    return [*(out.cpu() for out in outs), asked]


@pytest.mark.parametrize("whose", automodel.WHOSE)
def test_static_routing_asks_once(ranks, whose):
    for rank, (*outs, asked) in enumerate(ranks(run_static_routing, 2, whose)):
        assert asked == [True, False, False]
        for out in outs:
            torch.testing.assert_close(out, expected(rank, 6)[0], **TOLERANCE)
