# SPDX-License-Identifier: Apache-2.0
"""Replicas of popular experts in the flex dispatcher: weights through a hook on the experts."""

import dispatcher_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import weft
from weft.block_products import block_linear
from weft.dispatcher import DispatcherConfig, DispatcherGroups
from weft.overlap import DelayedExperts

E, H, INNER, K, TOKENS = 8, 16, 12, 3, 60


def balanced(groups, replicas, block_rows=1, **options):
    config = DispatcherConfig(
        num_moe_experts=E,
        moe_router_topk=K,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        moe_combine_order="topk",
        moe_balance_replicas=replicas,
        moe_balance_block_rows=block_rows,
        **options,
    ).validate()
    return cases.dispatcher("hybridep", groups, config)


def popular(seed):
    """Tokens most of which choose the first experts."""
    case = cases.routing(seed, TOKENS, H, E, K)
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, E, generator=gen) - torch.arange(E)
    chosen = torch.zeros(TOKENS, E, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(K).indices, True)
    probs = (torch.rand(TOKENS, E, generator=gen) + 0.1) * chosen
    return cases.Routing(case.x, chosen, probs)


class Grouped(nn.Module):
    """Two-layer experts by any product; it knows how many experts it has."""

    def __init__(self, w1, w2, linear=None, one_matrix=False):
        super().__init__()
        self.linear = linear
        self.num_local_experts = len(w1)
        self.one_matrix = one_matrix  # as Megatron-LM's GroupedMLP keeps all experts of a rank
        self.w1 = nn.Parameter(w1.reshape(H, -1) if one_matrix else w1.clone())
        self.w2 = nn.Parameter(w2.clone())

    def forward(self, rows, counts, probs):
        w1 = self.w1.view(self.num_local_experts, H, -1) if self.one_matrix else self.w1
        sizes = counts.tolist()
        assert len(sizes) == self.num_local_experts
        if self.linear is None:
            return cases.grouped(w1, self.w2)(rows, counts, probs)
        inner = self.linear(rows, w1, sizes).relu() * probs[:, None]
        return self.linear(inner, self.w2, sizes)


def step(made, experts, case):
    x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
    out, counts = cases.run(made, x, case.routing_map, probs, experts)
    out.square().sum().backward()
    return [out.detach(), x.grad, probs.grad, *(one.grad for one in experts.parameters())], counts


def layers_in_turn(rank, num_ranks, group, tp):
    """Two layers that share the places of replicas, with and without these."""
    weights = [cases.Experts(seed, E, H, INNER) for seed in (1, 2)]
    case = popular(10 + rank)
    linear = lambda rows, weight, sizes: block_linear(rows, weight, sizes, 16)  # noqa: E731
    found = []
    with cases.groups(tp, num_ranks // tp) as g:
        for replicas in (0, 2):
            layers = [balanced(g, replicas, 16) for _ in weights]
            first = layers[0].local_expert_indices[0]
            own = slice(first, first + layers[0].num_local_experts)
            shards = [w.shard(own, tp, layers[0].tp_rank) for w in weights]
            modules = [Grouped(*(one.detach() for one in pair), linear) for pair in shards]
            if replicas:
                for made, experts in zip(layers, modules):
                    made.replicate_experts(experts, wgrad="blocks")
            x, moved = case.x.clone().requires_grad_(), 0
            hidden = x
            for made, experts in zip(layers, modules):
                out, counts = cases.run(made, hidden, case.routing_map, case.probs, experts)
                moved += int(counts[layers[0].num_local_experts :].sum())
                hidden = hidden + out
            hidden.square().sum().backward()
            assert all("w1" not in vars(one) for one in modules)
            grads = [one.grad for module in modules for one in module.parameters()]
            found.append([hidden.detach(), x.grad, *grads])
    for plain, replicated in zip(*found, strict=True):
        assert torch.equal(plain, replicated)
    return moved


@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 1), (4, 1), (4, 2)])
def test_replicas_change_no_bit(ranks, num_ranks, tp):
    assert sum(ranks(layers_in_turn, num_ranks, tp)) > 0


def other_sizes(rank, num_ranks, group):
    """The last rank has other rows, or other experts, than all that the others have made."""
    local, weights, case = E // num_ranks, cases.Experts(3, E, H, INNER), popular(20 + rank)
    own = slice(rank * local, (rank + 1) * local)
    groups, is_wrong = DispatcherGroups(group, None, group), rank == num_ranks - 1
    experts = Grouped(weights.w1[own], weights.w2[own])
    wide = Grouped(
        *(torch.cat([one, one], dim) for one, dim in zip((experts.w1, experts.w2), (2, 1)))
    )
    made, other = balanced(groups, 1), balanced(groups, 1)
    made.replicate_experts(experts)
    other.replicate_experts(wide if is_wrong else experts)
    want, _ = step(made, experts, case)
    x = torch.cat([case.x, case.x], 1) if is_wrong else case.x
    for call in (
        lambda: cases.run(made, x, case.routing_map, case.probs, experts),
        lambda: cases.run(other, case.x, case.routing_map, case.probs, experts),
    ):
        with pytest.raises(weft.InvalidArgument, match="must be equal on all ranks"):
            call()
        experts.zero_grad()
        found, _ = step(made, experts, case)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_all_ranks_hear_of_one_with_other_sizes(ranks):
    ranks(other_sizes, 2)


def any_experts(rank, num_ranks, group, how):
    """Experts of other shapes and kinds against those without replicas."""
    local, weights, case = E // num_ranks, cases.Experts(3, E, H, INNER), popular(20 + rank)
    own = slice(rank * local, (rank + 1) * local)
    w1, w2 = weights.w1[own], weights.w2[own]
    groups = DispatcherGroups(group, None, group)
    plain = Grouped(w1, w2, product if how == "distributed" else None)
    want, _ = step(balanced(groups, 0), plain, case)
    experts, named = Grouped(w1, w2, one_matrix=how == "one matrix"), None
    if how == "one matrix":
        named = {"w1": (H, INNER), "w2": (INNER, H)}
    if how == "distributed":  # as under FSDP, whose mesh may be of any ranks
        mesh = DeviceMesh("cpu", list(range(num_ranks)))
        for name, weight in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(DTensor.from_local(weight.data, mesh, [Shard(0)])))
        named = ["w1", "w2"]
        compute = lambda rows, weight, sizes: product(rows, weight.to_local(), sizes)  # noqa: E731
        experts.linear = compute
    made = balanced(groups, 0)
    made.config.moe_balance_replicas = 1  # who makes the configuration may not know of it
    made.replicate_experts(experts, named)
    found, counts = step(made, experts, case)
    assert len(counts) == local + 1
    for a, b in zip(found, want, strict=True):
        a = a.to_local() if isinstance(a, DTensor) else a
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=1e-4, atol=1e-5)
    return int(counts[local:].sum())


def product(rows, weight, sizes):
    return torch.cat([part @ weight[e] for e, part in enumerate(rows.split(sizes))])


@pytest.mark.parametrize("how", ["parameters", "one matrix", "distributed"])
def test_any_grouped_experts_can_be_hooked(ranks, how):
    assert sum(ranks(any_experts, 2, how)) > 0


def delayed(rank, num_ranks, group):
    """Gradients of weights that a queue has until `backward_dw`, collective then."""
    local, case = E // num_ranks, popular(30 + rank)
    groups = DispatcherGroups(group, None, group)
    results = []
    for delay in (False, True):
        torch.manual_seed(rank)
        experts = DelayedExperts(local, H, INNER, delay_wgrad_compute=delay)
        made = balanced(groups, 1, moe_expert_rank_capacity_factor=4.0,
                        moe_experts_ignore_unused_rows=True)  # fmt: skip
        made.replicate_experts(experts, queue=experts._queue)
        x = case.x.clone().requires_grad_()
        out, _ = cases.run(made, x, case.routing_map, case.probs, experts)
        out.sum().backward()
        assert (experts.up.grad is None) == delay
        experts.backward_dw()
        assert not made.check_over_budget()
        results.append([out.detach(), x.grad, experts.up.grad, experts.down.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_may_be_left_for_later(ranks):
    ranks(delayed, 2)


def by_indices(rank, num_ranks, group):
    """NeMo Automodel's names of the phases: choices in place of a map."""
    local, case = E // num_ranks, popular(40 + rank)
    experts = Grouped(torch.ones(local, H, INNER), torch.ones(local, INNER, H))
    groups = DispatcherGroups(group, None, group)
    probs, chosen = case.probs.topk(K)
    outputs = []
    for replicas in (0, 2):
        made = balanced(groups, replicas)
        if replicas:
            made.replicate_experts(experts)
        rows, counts, row_probs = made.token_permutation2(case.x, TOKENS, probs, chosen)
        outputs.append(made.token_unpermutation(experts(rows, counts, row_probs)))
    torch.testing.assert_close(*outputs)


def test_choices_may_be_given_as_indices(ranks):
    ranks(by_indices, 2)


def refusals(rank, num_ranks, group):
    groups = DispatcherGroups(group, None, group)
    experts = Grouped(torch.ones(E, H, INNER), torch.ones(E, INNER, H))
    with pytest.raises(ValueError, match="there are none"):
        balanced(groups, 0).replicate_experts(experts)
    made = balanced(groups, 1)
    made.dispatch_preprocess(
        torch.zeros(1, H), torch.ones(1, E, dtype=torch.bool), torch.ones(1, E)
    )
    with pytest.raises(ValueError, match="whose weights"):
        made.token_dispatch(torch.zeros(1, H))
    with pytest.raises(weft.InvalidArgument, match="w1 has the shape"):
        made.replicate_experts(experts, {"w1": (H, INNER + 1)})
    with pytest.raises(weft.InvalidArgument, match="no weights are lent"):
        made.replicate_experts(experts)
        made.combine_preprocess(torch.zeros(1, H))
    assert dist.get_world_size() == num_ranks


def test_what_does_not_fit_is_refused(ranks):
    ranks(refusals, 1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"moe_balance_replicas": 17}, "moe_balance_replicas = 17"),
        ({"moe_combine_order": "token"}, "'token' is unknown"),
        ({"moe_balance_replicas": 1, "moe_flex_dispatcher_backend": "deepep"}, "needs the flex"),
        ({"moe_combine_order": "topk", "moe_token_dispatcher_type": "alltoall"}, "needs the flex"),
        (
            {
                "moe_balance_replicas": 1,
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
            },
            "excludes drop-and-pad",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings, reason):
    usual = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    with pytest.raises(ValueError, match=reason):
        DispatcherConfig(num_moe_experts=E, **usual | settings).validate()
