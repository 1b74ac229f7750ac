# SPDX-License-Identifier: Apache-2.0
"""Several layers and passes: many exchanges are open at once, and every run gives the same bits."""

from types import SimpleNamespace

import dispatcher_cases as cases
import dispatcher_standins as standins
import pytest
import torch
import torch.distributed as dist

from weft.dispatcher import (
    DispatcherConfig,
    MoEFlexTokenDispatcher,
    TokenDispatcherConfig,
)

E, H, K = 8, 16, 2

pytestmark = pytest.mark.parametrize("functions", standins.installed())


def _stack(rank, num_ranks, group, functions, backend, dtype):
    """Two layers and two batches forward, then both batches backward, last one first."""
    standins.use(functions)
    weights = [cases.Experts(seed, E, H, 8, dtype) for seed in (1, 2)]
    num_tokens = [(6, 9, 0, 4), (3, 3, 8, 1)]

    def train():
        with cases.groups(2, 2) as g:
            config = DispatcherConfig(num_moe_experts=E)
            layers = [cases.dispatcher(backend, g, config) for _ in weights]
            first = layers[0].local_expert_indices[0]
            experts = slice(first, first + layers[0].num_local_experts)
            leaves = [w.shard(experts, 2, layers[0].tp_rank) for w in weights]
            outs, inputs = [], []
            for batch, counts in enumerate(num_tokens):
                case = cases.routing(10 * batch + rank, counts[rank], H, E, K, dtype=dtype)
                x = case.x.clone().requires_grad_()
                hidden = x
                for made, pair in zip(layers, leaves):
                    out, _ = cases.run(
                        made, hidden, case.routing_map, case.probs, cases.grouped(*pair)
                    )
                    hidden = hidden + out
                outs.append(hidden)
                inputs.append(x)
            for out in reversed(outs):
                out.float().square().sum().backward()
            grads = [t.grad for t in inputs] + [t.grad for pair in leaves for t in pair]
            return [t.detach() for t in outs] + grads

    first, second = train(), train()
    assert all(torch.equal(a, b) for a, b in zip(first, second)), "two runs differ"
    return first


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_layers_and_batches_interleave(ranks, functions, backend):
    flex = ranks(_stack, 4, functions, backend, torch.float32)
    baseline = ranks(_stack, 4, functions, "alltoall", torch.float32)
    torch.testing.assert_close(flex, baseline, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["alltoall", "deepep", "hybridep"])
def test_every_run_gives_the_same_bits(ranks, functions, backend):
    ranks(_stack, 4, functions, backend, torch.bfloat16)


def _shared_manager(rank, num_ranks, group, functions, backend):
    """Layers that share a manager: both forward, then both backward."""
    standins.use(functions)
    config = TokenDispatcherConfig(num_moe_experts=E, moe_flex_dispatcher_backend=backend)
    local = E // num_ranks
    indices = list(range(rank * local, (rank + 1) * local))
    layers = [MoEFlexTokenDispatcher(local, indices, config, group) for _ in range(2)]
    assert layers[0]._comm_manager is layers[1]._comm_manager
    case = cases.routing(rank, 7, H, E, K)
    token_probs, chosen = case.probs.topk(K, dim=1)
    x = case.x.clone().requires_grad_()
    hidden = x
    for layer in layers:
        rows, _, probs = layer.token_permutation2(hidden, 7, token_probs, chosen)
        hidden = layer.token_unpermutation(rows * probs[:, None])
    scale = case.probs.sum(1, keepdim=True) ** 2
    torch.testing.assert_close(hidden, case.x * scale)
    hidden.sum().backward()
    torch.testing.assert_close(x.grad, scale.expand(7, H))


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "uccl_ep"])
def test_layers_share_a_manager(ranks, functions, backend):
    ranks(_shared_manager, 2, functions, backend)


def _plain_object(rank, num_ranks, group, functions, backend):
    """A settings object of another project, with what it happens to have."""
    standins.use(functions)
    config = SimpleNamespace(num_moe_experts=E, moe_flex_dispatcher_backend=backend)
    names = SimpleNamespace(ep_group=group, expt_tp_group=None, tp_ep_group=group)
    local = E // num_ranks
    made = MoEFlexTokenDispatcher(
        local, list(range(rank * local, (rank + 1) * local)), config, pg_collection=names
    )
    case = cases.routing(rank, 5, H, E, K)
    probs = torch.full((5, E), 1 / K, dtype=torch.bfloat16)
    out, _ = cases.run(made, case.x, case.routing_map, probs, cases.weigh)
    torch.testing.assert_close(out, case.x)
    assert dist.get_world_size() == num_ranks


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_takes_any_settings_and_groups(ranks, functions, backend):
    ranks(_plain_object, 2, functions, backend)
