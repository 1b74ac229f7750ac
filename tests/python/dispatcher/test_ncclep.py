# SPDX-License-Identifier: Apache-2.0
"""The backend of NCCL EP: what "hybridep" gives, bit for bit, and the dense layer."""

from contextlib import nullcontext

import dispatcher_cases as cases
import pytest
import torch

from weft import fused_a2a
from weft.dispatcher import DispatcherConfig, _NCCLEPManager, nccl_ep_release_context

E, H, K = 8, 16, 2


def settings_of(**settings):
    return DispatcherConfig(num_moe_experts=E, moe_router_topk=K, **settings)


def budget_of(factor, **settings):
    """For experts of any kind: those of these tests leave out unused rows."""
    given = {"moe_expert_rank_capacity_factor": factor, "moe_experts_ignore_unused_rows": True}
    return settings_of(**given, **settings)


def _dense(rank, num_ranks, group, tp, ep, settings):
    all_cases = [cases.routing(r, 5 + 3 * r, H, E, K, unrouted=0.2) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    with cases.groups(tp, ep) as g:
        found = []
        for kind in ("hybridep", "ncclep"):
            made = cases.dispatcher(kind, g, settings_of(**settings))
            out, counts = cases.check_against_dense(made, kind, tp, ep, all_cases, weights)
            assert counts.dtype == torch.int64
            found.append((out, counts))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
        assert isinstance(made._comm_manager, _NCCLEPManager)
        assert made.cudagraph_attrs[1] == "_comm_manager.token_indices"
        assert made.experts_read_received_rows and made._comm_manager.handle is None
        assert made.get_pipeline_runtime_initializers(hidden_dim=H, dtype=torch.float32) == ()
        assert made.check_over_budget() is None and made.check_required_capacity() is None
        nccl_ep_release_context()
        assert not fused_a2a.is_nccl_ep_bootstrapped()
        cases.check_against_dense(made, kind, tp, ep, all_cases, weights)  # set up anew


@pytest.mark.parametrize("settings", [{}, {"fp8": "hybrid"}], ids=["any", "aligned"])
@pytest.mark.parametrize("tp, ep", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_it_gives_what_hybridep_gives(ranks, tp, ep, settings):
    ranks(_dense, tp * ep, tp, ep, settings)


def _budget(rank, num_ranks, group):
    """A fixed number of rows: the flag, what would have been needed, growth."""
    with cases.groups(1, 2) as g:
        # 12 tokens count as 64, so 64 * 2 * 0.25 = 32 rows.
        made = cases.dispatcher("ncclep", g, budget_of(0.25))
        probs = torch.full((12, E), 1 / K)
        even = torch.zeros(12, E, dtype=torch.bool)
        even[:, [0, 4]] = True  # 24 rows arrive at each rank
        skewed = torch.zeros(12, E, dtype=torch.bool)
        skewed[:, [0, 1]] = True  # 48 rows arrive at rank 0
        x = torch.randn(12, H)
        seen = []
        for routing_map in (even, skewed, even):
            given = made.dispatch_preprocess(x, routing_map, probs)
            rows, row_probs = made.token_dispatch(*given)
            assert rows.shape == (32, H) and row_probs.shape == (32,)
            out = cases.weigh(rows, made._comm_manager.tokens_per_expert, row_probs)
            made.token_combine(out)
            flag, needed = made.check_over_budget(), made.check_required_capacity()
            assert flag.dtype == torch.bool and needed.dtype == torch.int64
            seen.append((bool(flag), int(needed)))
        assert seen == [(False, 24), (rank == 0, (48, 24)[rank]), (rank == 0, (48, 24)[rank])]
        made.reset_over_budget()
        assert not made.check_over_budget()
        made.grow_ep_recv_capacity(48)
        made.invalidate_ep_bootstrap()
        out, _ = cases.run(made, x, skewed, probs, cases.weigh)
        assert not made.check_over_budget()
        torch.testing.assert_close(out, x)
        for kind in (AssertionError, ValueError):
            with pytest.raises(kind, match="no growth"):
                made.grow_ep_recv_capacity(48)


def test_budgets_tell_what_they_lacked(ranks):
    ranks(_budget, 2)


def _replayed(rank, num_ranks, group, backend):
    """A step whose budget ran out, once more without one, as Megatron-LM's paged stash does."""
    with cases.groups(1, 2) as g:
        made = cases.dispatcher(backend, g, budget_of(0.25))
        skewed = torch.zeros(64, E, dtype=torch.bool)
        skewed[:, [0, 1]] = True  # all rows arrive at rank 0, at which half of a half fits
        given = (torch.randn(64, H), skewed, torch.full((64, E), 1 / K), cases.weigh)
        for _ in range(2):
            cut, _ = cases.run(made, *given)
            assert bool(made.check_over_budget()) == (rank == 0)
            made._comm_manager.moe_expert_rank_capacity_factor = None
            made.reset_over_budget()
            whole, _ = cases.run(made, *given)
            assert not made.check_over_budget()
            torch.testing.assert_close(whole, given[0])
            assert not torch.equal(cut, whole)
            factor = made.config.moe_expert_rank_capacity_factor
            made._comm_manager.moe_expert_rank_capacity_factor = factor


@pytest.mark.parametrize("backend", ["hybridep", "ncclep"])
def test_a_step_may_be_replayed_without_a_budget(ranks, backend):
    ranks(_replayed, 2, backend)


def _uneven(rank, num_ranks, group, told):
    num_tokens = (70, 0)[rank]
    with cases.groups(1, 2) as g:
        made = cases.dispatcher("ncclep", g, budget_of(1.0, **told))
        case = cases.routing(rank, num_tokens, H, E, K)
        probs = torch.full((num_tokens, E), 1 / K)
        out, _ = cases.run(made, case.x, case.routing_map, probs, cases.weigh)
        assert not made.check_over_budget()
        torch.testing.assert_close(out, case.x)


BUDGET = {"moe_expert_rank_capacity_factor": 1.0}
FUSED = {**BUDGET, "use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True}
TOLD = {
    "told": {"moe_max_tokens_per_rank": 70},
    "told by Megatron-LM": {"moe_ncclep_max_tokens_per_rank": 70},
    "asked": {"moe_hybridep_pad_uneven_dispatch_inputs": True},
}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
def test_uneven_tokens_share_the_largest_size(ranks, told):
    ranks(_uneven, 2, told)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"moe_expert_capacity_factor": 1.0}, "not supported"),
        ({"moe_pad_expert_input_to_capacity": True}, "not supported"),
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, "moe_dispatch_fwd_dtype: Weft does not quantise"),
        ({"moe_combine_bwd_dtype": "mxfp8"}, "moe_combine_bwd_dtype: Weft does not quantise"),
        ({"moe_ncclep_zero_copy": True}, "zero_copy: needs moe_expert_rank_capacity_factor"),
        ({**FUSED, "moe_ncclep_static_shape": False, "moe_ncclep_zero_copy": True}, "static_shape"),
        (BUDGET, "op_fuser and moe_grouped_gemm"),
        ({**FUSED, "moe_grouped_gemm": False}, "op_fuser and moe_grouped_gemm"),
        ({**FUSED, "use_transformer_engine_op_fuser": False}, "op_fuser and moe_grouped_gemm"),
    ],
)
def test_what_it_refuses(settings, text):
    with pytest.raises(ValueError, match=text):
        _NCCLEPManager(None, 4, K, E, settings_of(**settings))


@pytest.mark.parametrize("kind", [{"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"fp4": "e2m1"}])
def test_budgets_of_low_precision_need_experts_that_run_here(monkeypatch, kind):
    def make(is_refused, capability=None, switch=None, **settings):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", switch or "")
        wanted = pytest.raises(ValueError, match=is_refused) if is_refused else nullcontext()
        with wanted:
            _NCCLEPManager(None, 4, K, E, settings_of(**{**FUSED, **kind, **settings}))

    make("compute capability 10")
    make("compute capability 10", 9, "1")
    make("NVTE_CUTEDSL_FUSED_GROUPED_MLP=1", 10)
    make("NVTE_CUTEDSL_FUSED_GROUPED_MLP=1", 10, "0")
    make(None, 10, "1")
    make(None, moe_experts_ignore_unused_rows=True)
    make(None, moe_ncclep_static_shape=False)  # no budget, whatever the factor
    make(None, moe_expert_rank_capacity_factor=None)


def test_a_missing_function_is_named(monkeypatch):
    monkeypatch.setattr(fused_a2a, "nccl_ep_dispatch", None)
    with pytest.raises(ImportError, match="NCCL EP is not installed."):
        _NCCLEPManager(None, 4, K, E, settings_of())
