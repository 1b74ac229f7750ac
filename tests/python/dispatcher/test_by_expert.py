# SPDX-License-Identifier: Apache-2.0
"""Rows that arrive by expert are those that would arrive by rank and be permuted, bit for bit."""

import dispatcher_cases as cases
import pytest
import torch

from weft import fused_a2a
from weft.dispatcher import (
    DispatcherConfig,
    MoEFlexTokenDispatcher,
    TokenDispatcherConfig,
    manager,
)
from weft.overlap import freed_inputs

E, H, K = 8, 16, 3
SETTINGS = {
    "plain": {},
    "padded": {"fp8": "hybrid", "moe_permute_fusion": True},
    "aligned to 256": {"moe_use_grouped_tensor": True, "moe_permute_fusion": True},
    "not padded without fusion": {"fp8": "hybrid"},
    "fp64 probabilities": {"moe_router_dtype": "fp64"},
    "capacity": {"moe_expert_capacity_factor": 0.5},
}


def phases(made, case, by_expert, seed=5):
    """All that the experts, the layer and the gradients get to see."""
    if not by_expert:
        made._comm_manager._by_expert = None
    x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
    seen = []

    def experts(rows, counts, row_probs):
        # No row times the same number, so that a sum in another order has other bits.
        factor = torch.arange(rows.shape[0]).remainder(7).add(1).div(8).unsqueeze(1)
        out = rows * (factor * row_probs.unsqueeze(1)).to(rows.dtype)
        seen.extend([rows, counts, row_probs, out])
        return out

    out, _ = cases.run(made, x, case.routing_map, probs, experts)
    assert made._comm_manager.handle is None and made._comm_manager.dispatched_indices is None
    for tensor in seen:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    (out.float() * direction).sum().backward()
    # The permute of no tokens makes probabilities that have no gradient.
    row_grads = [
        torch.zeros_like(t) if t.grad is None else t.grad for t in seen if t.is_floating_point()
    ]
    made_of = [made._comm_manager.token_indices, made._comm_manager.token_probs]
    return [*made_of, *seen, out, x.grad, probs.grad, *row_grads]


def assert_same(direct, permuted):
    assert len(direct) == len(permuted)
    for i, (one, other) in enumerate(zip(direct, permuted)):
        assert one.dtype == other.dtype and one.device == other.device, f"result {i}"
        assert torch.equal(one, other), f"result {i}"


def _both_ways(rank, num_ranks, group, backend, tp, ep, num_tokens, dtype):
    with cases.groups(tp, ep) as g:
        for name, unrouted in [*((name, 0.4) for name in SETTINGS), ("plain", 0.0), ("plain", 1.0)]:
            case = cases.routing(rank, num_tokens[rank], H, E, K, unrouted=unrouted, dtype=dtype)
            results = []
            for by_expert in (True, False):
                config = DispatcherConfig(num_moe_experts=E, moe_router_topk=K, **SETTINGS[name])
                made = cases.dispatcher(backend, g, config)
                results.append(phases(made, case, by_expert))
            try:
                assert_same(*results)
            except AssertionError as error:
                raise AssertionError(f"{name}, {unrouted} unrouted: {error}") from error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "tp,ep,num_tokens",
    [
        (1, 1, (21,)),
        (1, 2, (21, 21)),
        (2, 1, (9, 30)),
        (1, 4, (7, 0, 33, 1)),
        (2, 2, (5, 12, 0, 8)),
        (1, 2, (0, 0)),
    ],
)
def test_same_bits_as_a_permute(ranks, tp, ep, num_tokens, dtype):
    ranks(_both_ways, tp * ep, "deepep", tp, ep, num_tokens, dtype)


def test_same_bits_as_a_permute_with_uccl(ranks):
    ranks(_both_ways, 2, "uccl_ep", 1, 2, (21, 4), torch.bfloat16)


def _from_indices(rank, num_ranks, group, backend):
    """Choices as NeMo Automodel gives them: -1 anywhere, and numbers that name no expert."""
    local = E // num_ranks
    case = cases.routing(rank, (19, 4)[rank], H, E, K)
    probs, indices = case.probs.topk(K, dim=1)
    indices[::4, 1] = -1
    indices[1::4, 0] = E + 5
    indices[2::4] = -7
    results = []
    for by_expert in (True, False):
        config = TokenDispatcherConfig(
            num_moe_experts=E,
            moe_router_topk=K,
            moe_flex_dispatcher_backend=backend,
            moe_share_token_dispatcher=False,
        )
        own = list(range(rank * local, (rank + 1) * local))
        made = MoEFlexTokenDispatcher(local, own, config, ep_group=group)
        if not by_expert:
            made._comm_manager._by_expert = None
        x, p = case.x.clone().requires_grad_(), probs.clone().requires_grad_()
        rows, counts, row_probs = made.token_permutation2(x, x.shape[0], p, indices)
        out = made.token_unpermutation(rows * row_probs.unsqueeze(1))
        out.square().sum().backward()
        results.append([rows, counts, row_probs, out, x.grad, p.grad])
    assert_same(*results)


@pytest.mark.parametrize("backend", ["deepep", "uccl_ep"])
def test_choices_that_name_no_expert(ranks, backend):
    ranks(_from_indices, 2, backend)


def _metadata(rank, num_ranks, group):
    """Each received row has one choice; a permute of that is the identity."""
    with cases.groups(1, 2) as g:
        config = DispatcherConfig(
            num_moe_experts=E, moe_router_topk=K, fp8="hybrid", moe_permute_fusion=True
        )
        made = cases.dispatcher("deepep", g, config)
        case = cases.routing(rank, 13, H, E, K)
        tokens, probs = made.dispatch_preprocess(case.x, case.routing_map, case.probs)
        received, received_probs = made.token_dispatch(tokens, probs)
        manager = made._comm_manager
        indices, dispatched_probs = manager.get_dispatched_metadata()
        assert indices.dtype == torch.int64 and indices.shape == received_probs.shape
        assert dispatched_probs is received_probs and manager.handle is not None
        counts = manager.get_number_of_tokens_per_expert()
        block = torch.arange(counts.numel()).repeat_interleave(counts)
        assert torch.equal(indices[:, 0].where(indices[:, 0] >= 0, block), block)
        is_padding = indices[:, 0] < 0
        assert is_padding.any() and not received[is_padding].any()
        assert not received_probs[is_padding].any() and received_probs[~is_padding].all()
        # A schedule may hand over another tensor of probabilities between the phases.
        _, _, row_probs = made.dispatch_postprocess(received, received_probs * 2)
        assert torch.equal(row_probs, received_probs[:, 0] * 2)


def test_received_rows_are_described(ranks):
    ranks(_metadata, 2)


def _which_way(rank, num_ranks, group, monkey):
    """Replaced functions, padding and overlap get rows with several choices; others by expert."""

    def num_choices(**settings):
        with cases.groups(1, 2) as g:
            config = DispatcherConfig(num_moe_experts=E, moe_router_topk=K, **settings)
            made = cases.dispatcher("deepep", g, config)
            if monkey:
                own = made._comm_manager._fused_dispatch
                made._comm_manager._fused_dispatch = lambda *args, **flags: own(*args, **flags)
            case = cases.routing(rank, 13, H, E, K)
            given = made.dispatch_preprocess(case.x, case.routing_map, case.probs)
            received, probs = made.token_dispatch(*given)
            rows, _, _ = made.dispatch_postprocess(received, probs)
            # Nobody may free received rows that the experts save.
            assert made.experts_read_received_rows == (rows is received)
            assert "fp8" in settings or freed_inputs(made).mlp == (rows is not received)
            return made._comm_manager.dispatched_indices.shape[1]

    assert num_choices() == (K if monkey else 1)
    padding = {"fp8": "hybrid", "moe_router_padding_for_quantization": True}
    assert num_choices(**padding) == K
    assert num_choices(overlap_moe_expert_parallel_comm=True) == K


@pytest.mark.parametrize("monkey", [False, True])
def test_replaced_functions_and_router_padding_get_received_rows(ranks, monkey):
    ranks(_which_way, 2, monkey)


def test_buffers_of_another_library_are_permuted(monkeypatch):
    assert manager.backend("deepep").by_expert is not None
    assert manager.backend("uccl_ep").by_expert is not None
    assert manager.backend("hybridep").by_expert is None
    monkeypatch.setattr(fused_a2a, "Buffer", object)
    monkeypatch.setattr(fused_a2a, "UCCLBuffer", object)
    assert manager.backend("deepep").by_expert is None
    assert manager.backend("uccl_ep").by_expert is None
