# SPDX-License-Identifier: Apache-2.0
"""An MoE layer on every family against a plain one in float64: outputs and gradients.

bf16 values are rounded on their way (experts' output, each rank's sum, gradients), each time by
2^-9 of their size: near means 2^-6 of the largest. fp32: 1e-5.
"""

import weakref

import fused_cases as cases
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import weft.fused_a2a as fa
from domain_cases import NUM_RANKS, two_domains


def layer(rank, num_ranks, group, family, tokens, dtype, flags):
    cases.reset()
    num_tokens = tokens[rank % len(tokens)]
    cases.check_layer(family, group, rank, num_tokens, 4 * num_ranks, 3, dtype, **flags)


@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients(ranks, family, num_ranks):
    ranks(layer, num_ranks, family, (9, 0, 17, 4), torch.bfloat16, {})


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_gradients_in_fp32(ranks, family):
    ranks(layer, 2, family, (9, 5), torch.float32, {})


def test_gradients_fused(ranks):
    ranks(layer, 2, "hybridep", (9, 5), torch.bfloat16, {"fused": True})


def several_hosts(rank, num_ranks, group, tokens):
    with two_domains() as hosts:
        for family in cases.FAMILIES:
            cases.reset()
            cases.check_layer(family, hosts, rank, tokens[rank], 4 * num_ranks, 3)
            for buffer in (fa._buffer, fa._uccl_buffer):
                assert buffer is None or buffer.runtime.get_num_rdma_ranks() == 2
        cases.reset()


def test_gradients_between_hosts(ranks):
    ranks(several_hosts, NUM_RANKS, (9, 0, 17, 4))


def freed_inputs(rank, num_ranks, group, family):
    """Backward when the storage of all forward inputs is gone."""
    cases.reset()
    weights = cases.expert_weights(4 * num_ranks)
    x, idx, probs = cases.inputs(rank, 8, 3, 4 * num_ranks)
    grads = []
    for free in (False, True):
        xs, ps = cases.leaves(x, probs)
        x_in, p_in, to_free = xs * 1.0, ps * 1.0, []
        idx_in = idx.clone()
        out = cases.moe(family, group, x_in, idx_in, p_in, weights, to_free_rows(to_free))
        assert len(to_free) == 1
        if free:
            for tensor in (x_in, p_in, *to_free):
                tensor.detach().untyped_storage().resize_(0)
            if family != "hybridep":  # whose map is made of the indices
                idx_in.untyped_storage().resize_(0)
            del tensor
            kept = weakref.ref(to_free.pop())
            assert kept() is None
        out.float().square().sum().backward()
        grads.append((xs.grad, ps.grad))
    for kept, freed in zip(*grads):
        assert torch.equal(kept, freed)


def to_free_rows(to_free):
    def on_rows(rows):
        rows = rows * 1.0  # its own tensor: nothing before it needs its values in backward
        to_free.append(rows)
        return rows

    return on_rows


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_backward_needs_no_input(ranks, family):
    ranks(freed_inputs, 2, family)


def checkpointed(rank, num_ranks, group, family, reentrant):
    cases.reset()
    weights = cases.expert_weights(4 * num_ranks)
    x, idx, probs = cases.inputs(rank, 8, 3, 4 * num_ranks)
    results = []
    for use in (False, True):
        xs, ps = cases.leaves(x, probs)
        h = xs
        for _ in range(2):  # two layers: the second runs again before the first

            def run(h, p):
                return cases.moe(family, group, h, idx, p, weights)

            h = checkpoint(run, h, ps, use_reentrant=reentrant) if use else run(h, ps)
        h.float().square().sum().backward()
        results.append((h.detach(), xs.grad, ps.grad))
    for plain, again in zip(*results):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_checkpointing(ranks, family, reentrant):
    ranks(checkpointed, 2, family, reentrant)


def without_grad(rank, num_ranks, group, family):
    cases.reset()
    weights = cases.expert_weights(4 * num_ranks)
    x, idx, probs = cases.inputs(rank, 8, 3, 4 * num_ranks)
    xs, ps = cases.leaves(x, probs)
    out = cases.moe(family, group, xs, idx, ps, weights)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            silent = cases.moe(family, group, xs, idx, ps, weights)
        assert not silent.requires_grad and torch.equal(silent, out)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_without_grad(ranks, family):
    ranks(without_grad, 2, family)


def autocast(rank, num_ranks, group, family):
    """Autocast changes what the experts compute, not what the exchange moves."""
    cases.reset()
    weights = cases.expert_weights(4 * num_ranks)
    x, idx, probs = cases.inputs(rank, 8, 3, 4 * num_ranks)
    xs, ps = cases.leaves(x, probs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cases.moe(family, group, xs, idx, ps, weights)
        out.float().square().sum().backward()
    their = cases.leaves(x.double(), probs.double())
    want = cases.plain_moe(their[0], idx, their[1], weights.double())
    want.square().sum().backward()
    cases.check_grads(out, want, (xs, ps), their, torch.bfloat16)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_autocast(ranks, family):
    ranks(autocast, 2, family)


def second_order(rank, num_ranks, group, family):
    cases.reset()
    weights = cases.expert_weights(4 * num_ranks)
    x, idx, probs = cases.inputs(rank, 8, 3, 4 * num_ranks)
    xs, ps = cases.leaves(x, probs)
    out = cases.moe(family, group, xs, idx, ps, weights)
    (grad,) = torch.autograd.grad(out.float().square().sum(), xs, create_graph=True)
    try:
        grad.float().sum().backward()
    except RuntimeError as error:
        return "once_differentiable" in str(error)
    return False


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_second_order_is_refused(ranks, family):
    assert ranks(second_order, 1, family) == [True]
