# SPDX-License-Identifier: Apache-2.0
"""A fixed number of rows for each rank: what is kept, what is dropped, who says so."""

import dispatcher_cases as cases
import dispatcher_standins as standins
import pytest
import torch

from weft.dispatcher import DispatcherConfig

E, H, K = 8, 16, 2

pytestmark = pytest.mark.parametrize("functions", standins.installed())


def _kept(all_cases, num_local, budgets, align, tp):
    """The routes of each rank that fit everywhere: late experts and late rows fall out first."""
    kept = [c.routing_map.clone() for c in all_cases]
    dropped = False
    for rank, budget in enumerate(budgets):
        used = 0
        first = rank // tp * num_local
        for e in range(first, first + num_local):
            begin = used
            for source, case in enumerate(all_cases):
                for t in case.routing_map[:, e].nonzero().flatten().tolist():
                    if used >= budget:
                        kept[source][t, e] = False
                        dropped = True
                    used += 1
            used = begin + -(-(used - begin) // align) * align
    return kept, dropped


def _budget(rank, num_ranks, group, functions, ep, factor, settings, align):
    standins.use(functions)
    all_cases = [cases.routing(r, 12, H, E, K) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    rows = -(-int(12 * K * factor) // align) * align
    keep, dropped = _kept(all_cases, E // ep, [rows] * num_ranks, align, 1)
    with cases.groups(1, ep) as g:
        config = DispatcherConfig(
            num_moe_experts=E, moe_expert_rank_capacity_factor=factor, **settings
        )
        made = cases.dispatcher("hybridep", g, config)
        _, counts = cases.check_against_dense(made, "budget", 1, ep, all_cases, weights, keep=keep)
        assert int(counts.sum()) <= rows
        flag = made.check_over_budget()
        assert flag.dtype == torch.bool and flag.shape == (1,)
        was_over = bool(flag)
        made.reset_over_budget()
        assert not made.check_over_budget()
        return was_over, dropped


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 4.0])
@pytest.mark.parametrize(
    "settings,align", [({}, 1), ({"fp8": "hybrid"}, 16)], ids=["any", "aligned"]
)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_routes_that_do_not_fit_are_dropped(ranks, functions, ep, factor, settings, align):
    flags, dropped = zip(*ranks(_budget, ep, functions, ep, factor, settings, align))
    assert any(flags) == dropped[0]


def _flag(rank, num_ranks, group, functions):
    """The flag says whether anything was dropped since the last reset, on any call."""
    standins.use(functions)
    with cases.groups(1, 2) as g:
        config = DispatcherConfig(num_moe_experts=E, moe_expert_rank_capacity_factor=1.0)
        made = cases.dispatcher("hybridep", g, config)
        probs = torch.full((12, E), 1 / K)
        even = torch.zeros(12, E, dtype=torch.bool)
        even[:, [0, 4]] = True  # one route to each rank: 24 rows arrive, 24 fit
        skewed = torch.zeros(12, E, dtype=torch.bool)
        skewed[:, [0, 1]] = True  # both routes to rank 0: 48 rows arrive
        x = torch.randn(12, H)
        seen = []
        for routing_map in (even, skewed, even):
            cases.run(made, x, routing_map, probs, cases.weigh)
            seen.append(bool(made.check_over_budget()))
        # The rank whose rows ran out says so.
        if rank == 0:
            assert seen == [False, True, True]
        made.reset_over_budget()
        cases.run(made, x, even, probs, cases.weigh)
        assert not made.check_over_budget()
        # Growth takes it all.
        made.grow_ep_recv_capacity(48)
        out, _ = cases.run(made, x, skewed, probs, cases.weigh)
        assert not made.check_over_budget()
        torch.testing.assert_close(out, x)
        with pytest.raises(ValueError, match="no growth"):
            made.grow_ep_recv_capacity(48)


def test_the_flag_lasts_until_it_is_reset(ranks, functions):
    ranks(_flag, 2, functions)


def _tensor_parallel(rank, num_ranks, group, functions):
    """Every TP rank brings its tokens to every TP rank: a factor of 1 must hold an even load."""
    standins.use(functions)
    with cases.groups(2, 2) as g:
        config = DispatcherConfig(num_moe_experts=E, moe_expert_rank_capacity_factor=1.0)
        made = cases.dispatcher("hybridep", g, config)
        routing_map = torch.zeros(8, E, dtype=torch.bool)
        routing_map[:, [0, 4]] = True
        x = torch.randn(8, H)
        out, counts = cases.run(made, x, routing_map, torch.full((8, E), 1 / K), cases.weigh)
        assert not made.check_over_budget()
        assert int(counts.sum()) == 8 * 4
        torch.testing.assert_close(out, 2 * x)


def test_the_budget_counts_every_tp_rank(ranks, functions):
    ranks(_tensor_parallel, 4, functions)


def _uneven(rank, num_ranks, group, functions, settings):
    """A rank without tokens has rows for those of the others if it knows how many they may be."""
    standins.use(functions)
    num_tokens = (20, 0)
    with cases.groups(1, 2) as g:
        config = DispatcherConfig(num_moe_experts=E, **settings)
        made = cases.dispatcher("hybridep", g, config)
        case = cases.routing(rank, num_tokens[rank], H, E, K)
        probs = torch.full((num_tokens[rank], E), 1 / K)
        out, _ = cases.run(made, case.x, case.routing_map, probs, cases.weigh)
        assert not made.check_over_budget()
        torch.testing.assert_close(out, case.x)


BUDGET = {"moe_expert_rank_capacity_factor": 1.0}
BLOCKS = {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True}
TOLD = {"moe_max_tokens_per_rank": 20}
ASKED = {"moe_hybridep_pad_uneven_dispatch_inputs": True}
ASKED_ON_DEV = {"moe_hybridep_pad_variable_tokens": True}


@pytest.mark.parametrize("told", [TOLD, ASKED, ASKED_ON_DEV], ids=["told", "asked", "asked_on_dev"])
@pytest.mark.parametrize("sizes", [BUDGET, BLOCKS], ids=["budget", "blocks"])
def test_uneven_tokens_share_the_largest_size(ranks, functions, sizes, told):
    ranks(_uneven, 2, functions, sizes | told)


def _unused_rows(rank, num_ranks, group, functions):
    """Whatever stands in unused rows reaches no token and no gradient."""
    standins.use(functions)

    def experts(rows, counts, row_probs):
        used = int(counts.sum())
        out = rows * row_probs[:, None]
        return torch.cat([out[:used], torch.full_like(out[used:], float("nan"))])

    with cases.groups(1, 2) as g:
        config = DispatcherConfig(num_moe_experts=E, moe_expert_rank_capacity_factor=4.0)
        made = cases.dispatcher("hybridep", g, config)
        case = cases.routing(rank, 6, H, E, K)
        x = case.x.clone().requires_grad_()
        out, _ = cases.run(made, x, case.routing_map, torch.full((6, E), 1 / K), experts)
        torch.testing.assert_close(out, case.x)
        out.backward(case.x)
        torch.testing.assert_close(x.grad, case.x)


def test_unused_rows_reach_nothing(ranks, functions):
    ranks(_unused_rows, 2, functions)
