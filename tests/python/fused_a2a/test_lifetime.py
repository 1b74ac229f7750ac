# SPDX-License-Identifier: Apache-2.0
"""Handles and buffers that outlive other calls: several alive, growth, several groups, threads."""

import threading
from unittest import mock

import fused_cases as cases
import pytest
import torch
import torch.distributed as dist

import weft.fused_a2a as fa


def interleaved(rank, num_ranks, group, family):
    """Several layers alive, of different routing, backward in another order and on a thread."""
    cases.reset()
    num_experts = 4 * num_ranks
    weights = cases.expert_weights(num_experts)
    layers = []
    for seed, num_tokens in enumerate((8, 3 + rank, 0 if rank else 5)):
        x, idx, probs = cases.inputs(rank, num_tokens, 3, num_experts, torch.float32, seed=seed)
        xs, ps = cases.leaves(x, probs)
        out = cases.moe(family, group, xs, idx, ps, weights)
        layers.append((x, idx, probs, xs, ps, out))
    errors = []

    def backward():
        try:
            for which in (1, 0, 2):
                layers[which][-1].square().sum().backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(50)
    assert not thread.is_alive() and not errors, errors
    for x, idx, probs, xs, ps, out in layers:
        their = cases.leaves(x.double(), probs.double())
        want = cases.plain_moe(their[0], idx, their[1], weights.double())
        want.square().sum().backward()
        cases.check_grads(out, want, (xs, ps), their, torch.float32)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_several_alive_and_backward_on_another_thread(ranks, family):
    ranks(interleaved, 2, family)


def growing(rank, num_ranks, group, family):
    """Layers of other sizes and other SM counts between a layer's forward and its backward."""
    cases.reset()
    num_experts = 4 * num_ranks
    weights = cases.expert_weights(num_experts)
    x, idx, probs = cases.inputs(rank, 8, 3, num_experts)
    xs, ps = cases.leaves(x, probs)
    out = cases.moe(family, group, xs, idx, ps, weights)
    sms = fa.Buffer.num_sms
    fa.set_deepep_num_sms(sms + 4)
    try:
        for hidden, topk in ((4096, 2), (64, 4)):
            wide = torch.ones(20, hidden, dtype=torch.bfloat16, requires_grad=True)
            wide_idx = torch.arange(topk).expand(20, topk).contiguous()
            wide_probs = torch.ones(20, topk)
            if family == "hybridep":
                routing_map, dense = cases.to_dense(wide_idx, wide_probs, 2 * num_ranks * topk)
                rows, _, _, _, handle = fa.hybrid_ep_dispatch(
                    wide, routing_map, dense, group, 2 * topk
                )
                back = fa.hybrid_ep_combine(rows, handle)
            else:
                rows, _, _, _, handle = cases.dispatch_rows(
                    family, group, wide, wide_idx, wide_probs, num_experts
                )
                back, _ = cases.combine_rows(family, group, rows, handle)
            back.sum().backward()
            copies = topk if family == "hybridep" else 1
            assert torch.equal(wide.grad, torch.full_like(wide, float(copies)))
        out.float().square().sum().backward()
    finally:
        fa.set_deepep_num_sms(sms)
    their = cases.leaves(x.double(), probs.double())
    want = cases.plain_moe(their[0], idx, their[1], weights.double())
    want.square().sum().backward()
    cases.check_grads(out, want, (xs, ps), their, torch.bfloat16)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_buffer_grows_between_forward_and_backward(ranks, family):
    ranks(growing, 2, family)


def asked_once(rank, num_ranks, group, name):
    """The sizes of a buffer are asked when something about them is new."""
    cases.reset()
    kind = getattr(fa, name)
    get = fa.get_buffer if kind is fa.Buffer else fa.get_uccl_buffer
    sms, config = kind.num_sms, kind.get_dispatch_config
    with mock.patch.object(kind, "get_dispatch_config", side_effect=config) as asked:
        first = get(group, 1024)
        assert all(get(group, 1024) is first for _ in range(3)) and asked.call_count == 1
        assert get(group, 512) is first and asked.call_count == 2
        wide = get(group, 4096)
        assert wide is not first and get(group, 4096) is wide and asked.call_count == 3
        try:
            kind.set_num_sms(sms + 4)
            wider = get(group, 4096)
        finally:
            kind.set_num_sms(sms)
        assert wider.num_nvl_bytes > wide.num_nvl_bytes and asked.call_count == 4
        twin = dist.new_group(list(range(num_ranks)))
        assert get(twin, 4096) is get(group, 4096) is wider and asked.call_count == 5
        cases.reset()
        assert get(group, 4096) is not wider
    cases.reset()


@pytest.mark.parametrize("name", ["Buffer", "UCCLBuffer"])
def test_sizes_are_asked_once(ranks, name):
    ranks(asked_once, 2, name)


def two_groups(rank, num_ranks, group, family):
    """Layers on different groups take turns; the buffers stay."""
    cases.reset()
    small = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    twin = dist.new_group(list(range(num_ranks)))
    buffers = []
    outs = []
    for turn in range(2):
        for where in (group, small, twin):
            num_experts = 2 * dist.get_world_size(where)
            weights = cases.expert_weights(num_experts)
            x, idx, probs = cases.inputs(rank, 5, 2, num_experts, seed=turn)
            xs, ps = cases.leaves(x, probs)
            outs.append((x, idx, probs, weights, xs, ps))
            outs[-1] += (cases.moe(family, where, xs, idx, ps, weights),)
            buffers.append(current(family))
    assert buffers[0] is buffers[2] and buffers[0] is not buffers[1]
    assert buffers[3:] == buffers[:3]
    for x, idx, probs, weights, xs, ps, out in reversed(outs):
        out.float().square().sum().backward()
        their = cases.leaves(x.double(), probs.double())
        want = cases.plain_moe(their[0], idx, their[1], weights.double())
        want.square().sum().backward()
        cases.check_grads(out, want, (xs, ps), their, torch.bfloat16)
    cases.reset()


def current(family):
    names = {"deepep": "_buffer", "uccl": "_uccl_buffer", "deepepv2": "_elastic_buffer"}
    return getattr(fa, names.get(family, "_hybrid_ep_buffer"))


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_groups_take_turns(ranks, family):
    ranks(two_groups, 4, family)


def crossed_groups(rank, num_ranks, group):
    """Both dispatches, then both combines: each handle goes back on its own group."""
    cases.reset()
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    routing_map = torch.ones(3, 2, dtype=torch.bool)
    x = torch.ones(3, cases.HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    first = fa.hybrid_ep_dispatch(x, routing_map, routing_map.float(), group, 1)
    second = fa.hybrid_ep_dispatch(x, routing_map, routing_map.float(), alone, 2)
    back = fa.hybrid_ep_combine(first[0], first[-1])
    own = fa.hybrid_ep_combine(second[0], second[-1])
    assert torch.equal(back, torch.full_like(x, 2.0)) and torch.equal(own, back)
    (back.sum() + own.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))


def test_handles_of_two_groups_cross(ranks):
    ranks(crossed_groups, 2)
