# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's own token dispatcher, as it comes from PyPI, over Weft: what docs/automodel.md
promises.

It runs unchanged, on CPU tensors. Expert e multiplies its rows by 1 + e.
"""

from unittest.mock import patch

import pytest
import torch

HIDDEN, EXPERTS, TOPK = 64, 8, 3


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


def automodel():
    """Its modules over Weft's deep_ep; UCCL's classes must be given to it one by one."""
    import weft.compat

    weft.compat.install(force=True)
    try:
        from nemo_automodel.components.moe.megatron import fused_a2a, token_dispatcher
    finally:
        weft.compat.uninstall()
    from weft.compat import uccl

    fused_a2a.UCCLBuffer = uccl.UCCLBuffer
    fused_a2a.UCCLEventHandle = uccl.EventHandle
    fused_a2a.UCCLEventOverlap = uccl.EventOverlap
    return token_dispatcher


def run_dispatcher(rank, num_ranks, group, backend, num_tokens):
    module = automodel()
    local = EXPERTS // num_ranks
    own = list(range(rank * local, (rank + 1) * local))
    config = module.TokenDispatcherConfig(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_flex_dispatcher_backend=backend,
        moe_share_token_dispatcher=False,
    )
    dispatcher = module.MoEFlexTokenDispatcher(
        num_local_experts=local, local_expert_indices=own, config=config, ep_group=group
    )
    x, experts, probs = inputs(rank, num_tokens[rank])
    x.requires_grad_()
    probs.requires_grad_()
    no_gpu = patch.object(torch.cuda, "synchronize", lambda device=None: None)
    with no_gpu, patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)):
        rows, counts, row_probs = dispatcher.token_permutation2(x, num_tokens[rank], probs, experts)
        factors = torch.repeat_interleave(1.0 + torch.tensor(own), counts)
        rows = rows * (factors * row_probs).unsqueeze(-1)
        out = dispatcher.token_unpermutation(rows)
        out.backward(torch.arange(1.0, 1 + HIDDEN).expand(out.shape))
    return [out.detach(), x.grad, probs.grad]


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "uccl_ep"])
@pytest.mark.parametrize("num_tokens", [[5, 8], [0, 3]])
def test_dispatcher_gives_what_dense_experts_give(ranks, num_tokens, backend):
    found = ranks(run_dispatcher, 2, backend, num_tokens)
    for rank, tensors in enumerate(found):
        for tensor, wanted in zip(tensors, expected(rank, num_tokens[rank]), strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-4)
