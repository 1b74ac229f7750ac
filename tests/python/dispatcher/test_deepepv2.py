# SPDX-License-Identifier: Apache-2.0
"""The backend of DeepEP V2: what "deepep" gives, bit for bit, and the dense layer."""

import dispatcher_cases as cases
import pytest
import torch

from weft import fused_a2a
from weft.dispatcher import DispatcherConfig, _DeepepV2Manager, manager
from weft.fused_a2a import rank_rows

E, H, K = 8, 16, 2
# Rows arrive by expert; or they are permuted, with or without a word on how many there may be.
SETTINGS = {
    "by expert": {},
    "permuted": {"overlap_moe_expert_parallel_comm": True},
    "padded": {"moe_router_padding_for_quantization": True, "fp8": "hybrid"},
    "told": {"overlap_moe_expert_parallel_comm": True, "moe_max_tokens_per_rank": 40},
}


def settings_of(**settings):
    return DispatcherConfig(num_moe_experts=E, moe_router_topk=K, **settings)


def _dense(rank, num_ranks, group, tp, ep, settings):
    sizes = [20 + 3 * r if r != 1 else 0 for r in range(num_ranks)]
    all_cases = [cases.routing(r, sizes[r], H, E, K, unrouted=0.2) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    with cases.groups(tp, ep) as g:
        found = []
        for kind in ("deepep", "deepepv2"):
            made = cases.dispatcher(kind, g, settings_of(**settings))
            found.append(cases.check_against_dense(made, kind, tp, ep, all_cases, weights))
        assert all(torch.equal(one, two) for one, two in zip(*found))
        assert type(made._comm_manager) is _DeepepV2Manager
        is_by_expert = not settings
        assert made.experts_read_received_rows == is_by_expert
        assert (made._comm_manager._buffer is None) == is_by_expert
        if not is_by_expert:
            assert made._comm_manager._buffer is fused_a2a._elastic_buffer


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tp, ep", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_it_gives_what_deepep_gives(ranks, tp, ep, name):
    ranks(_dense, tp * ep, tp, ep, SETTINGS[name])


def _replaced(rank, num_ranks, group):
    """Functions that a caller puts in place move the rows."""
    seen = []

    def dispatch(*given, **options):
        seen.append("dispatch")
        return rank_rows.deepepv2_dispatch(*given, **options)

    usual, fused_a2a.deepepv2_dispatch = fused_a2a.deepepv2_dispatch, dispatch
    try:
        assert manager.backend("deepepv2").by_expert is None
        with cases.groups(1, 2) as g:
            made = cases.dispatcher("deepepv2", g, settings_of())
            case = cases.routing(rank, 5 + rank, H, E, K)
            probs = torch.full((5 + rank, E), 1 / K)
            out, _ = cases.run(made, case.x, case.routing_map, probs, cases.weigh)
        torch.testing.assert_close(out, case.x)
        assert seen == ["dispatch"]
    finally:
        fused_a2a.deepepv2_dispatch = usual


def test_functions_that_were_replaced_count(ranks):
    ranks(_replaced, 2)


def test_what_it_refuses(monkeypatch):
    given = {"group": None, "router_topk": K, "num_experts": E, "num_local_experts": 4}
    with pytest.raises(ValueError, match="moe_pad_expert_input_to_capacity"):
        _DeepepV2Manager(**given, config=settings_of(moe_pad_expert_input_to_capacity=True))
    monkeypatch.setattr(fused_a2a, "deepepv2_dispatch", None)
    with pytest.raises(ImportError, match="DeepEP V2 is not installed."):
        _DeepepV2Manager(**given, config=settings_of())
