# SPDX-License-Identifier: Apache-2.0
"""The flex dispatcher as NeMo Automodel builds and calls it."""

import dispatcher_cases as cases
import dispatcher_standins as standins
import pytest
import torch

from domain_cases import NUM_RANKS, two_domains
from weft.dispatcher import (
    MoEFlexTokenDispatcher,
    TokenDispatcherConfig,
    _DeepepManager,
    _HybridEPMetadataProcessor,
)

E, H, K = 8, 16, 2
BACKENDS = ["deepep", "hybridep", "uccl_ep"]

functions = pytest.mark.parametrize("functions", standins.installed())


def _make(backend, group, **settings):
    config = TokenDispatcherConfig(
        num_moe_experts=E, moe_flex_dispatcher_backend=backend, **settings
    )
    local = E // group.size()
    first = group.rank() * local
    return MoEFlexTokenDispatcher(
        num_local_experts=local,
        local_expert_indices=list(range(first, first + local)),
        config=config,
        ep_group=group,
    )


def _choices(case):
    """Top-k indices and probabilities of a case, -1 and 0 where a choice was taken out."""
    probs, indices = (case.probs * case.routing_map).topk(K, dim=1)
    return probs, indices.masked_fill(probs == 0, -1)


def _calls(rank, num_ranks, group, functions, backend, num_tokens):
    standins.use(functions)
    made = _make(backend, group)
    assert (made.tp_size, made.ep_size) == (1, num_ranks)
    case = cases.routing(rank, num_tokens[rank], H, E, K, unrouted=0.3)
    dense = case.probs * case.routing_map
    expected = case.x * dense.sum(1, keepdim=True)
    token_probs, indices = _choices(case)
    x = case.x.clone().requires_grad_()
    token_probs.requires_grad_()
    num = num_tokens[rank]

    rows, counts, row_probs = made.token_permutation2(x, num, token_probs, indices)
    assert rows.shape[0] == int(counts.sum()) == row_probs.shape[0]
    out = made.token_unpermutation(rows * row_probs[:, None])
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(1, keepdim=True).expand(num, H))
    wanted = case.x.sum(1, keepdim=True).expand(num, K) * (indices >= 0)
    torch.testing.assert_close(token_probs.grad, wanted, rtol=1e-4, atol=1e-5)

    rows, _, row_probs = made.token_permutation(x, num, dense)
    torch.testing.assert_close(made.token_unpermutation(rows * row_probs[:, None]), expected)

    hidden, _ = made.dispatch_preprocess(hidden_states=x, num_local_tokens=num, probs=dense)
    rows, travelled = made.dispatch_all_to_all(hidden, None, False, False)
    rows, _, row_probs = made.dispatch_postprocess(rows)
    out = made.combine_preprocess(rows * row_probs[:, None])
    out = made.combine_postprocess(made.combine_all_to_all(out, False, False))
    torch.testing.assert_close(out, expected)


@functions
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [(8, 8), (5, 0), (0, 0)])
def test_every_way_to_call(ranks, functions, backend, num_tokens):
    ranks(_calls, 2, functions, backend, num_tokens)


def test_other_names_call_what_a_subclass_overrides():
    class Doubled(MoEFlexTokenDispatcher):
        def token_dispatch(self, *given, **options):
            return "dispatch", given, options

        def token_combine(self, *given, **options):
            return "combine", given, options

    made = Doubled.__new__(Doubled)
    assert made.dispatch_all_to_all(1, async_finish=2) == ("dispatch", (1,), {"async_finish": 2})
    assert made.combine_all_to_all(1, async_finish=2) == ("combine", (1,), {"async_finish": 2})


def _between_hosts(rank, num_ranks, group, num_tokens):
    with two_domains() as hosts:
        for backend in BACKENDS:
            _calls(rank, num_ranks, hosts, "weft", backend, num_tokens)


def test_every_way_to_call_between_hosts(ranks):
    ranks(_between_hosts, NUM_RANKS, (8, 5, 0, 3))


def _pad_multiple(rank, num_ranks, group, functions, num_tokens):
    standins.use(functions)
    made = _make("deepep", group, moe_router_expert_pad_multiple=4)
    case = cases.routing(rank, num_tokens, H, E, K)
    probs, indices = _choices(case)
    rows, counts, row_probs = made.token_permutation2(case.x, num_tokens, probs, indices)
    assert int(counts.sum()) == rows.shape[0]
    out = made.token_unpermutation(rows * row_probs[:, None])
    torch.testing.assert_close(out, case.x * case.probs.sum(1, keepdim=True))
    return counts.tolist()


@functions
def test_router_padding(ranks, functions):
    for counts in ranks(_pad_multiple, 2, functions, 16):
        assert all(c % 4 == 0 for c in counts)
    ranks(_pad_multiple, 2, functions, 1)  # too few rows to pad with


def _sharing(rank, num_ranks, group):
    standins.use("standins")
    one, two = _make("deepep", group), _make("deepep", group)
    uccl, hybrid = _make("uccl_ep", group), _make("hybridep", group)
    assert one._comm_manager is two._comm_manager is MoEFlexTokenDispatcher.shared_deepep_manager
    assert uccl._comm_manager is MoEFlexTokenDispatcher.shared_uccl_manager
    assert uccl._comm_manager is not one._comm_manager
    assert hybrid._comm_manager is MoEFlexTokenDispatcher.shared_hybridep_manager
    other = _make("deepep", group, moe_router_topk=4)
    assert other._comm_manager.router_topk == 4 and one._comm_manager.router_topk == K
    own = _make("deepep", group, moe_share_token_dispatcher=False)
    assert own._comm_manager is not other._comm_manager


def test_layers_share_a_manager_of_equal_arguments(ranks):
    ranks(_sharing, 2)


class Calls:
    """A dispatch and a combine that note their arguments."""

    def __init__(self):
        self.seen = []

    def dispatch(self, x, indices, probs, num_experts, group, **flags):
        self.seen.append(flags)
        return x, indices, probs, torch.tensor([1, 1]), "handle"

    def combine(self, x, group, handle, **flags):
        self.seen.append(flags)
        return x, None


def test_injected_functions_get_the_flags():
    calls = Calls()
    manager = _DeepepManager(
        None,
        1,
        num_experts=2,
        num_local_experts=2,
        _dispatch_fn=calls.dispatch,
        _combine_fn=calls.combine,
    )
    manager.setup_metadata(2, torch.tensor([[0.0, 1.0], [0.5, 0.0]], dtype=torch.bfloat16))
    rows = manager.dispatch(torch.ones(2, 4), True, True)
    assert manager.dispatched_probs.dtype == torch.float32
    rows, probs = manager.get_permuted_hidden_states_by_experts(rows)
    assert probs.tolist() == [0.5, 1.0]
    manager.combine(manager.get_restored_hidden_states_by_experts(rows), True, True)
    flags = {"async_finish": True, "allocate_on_comm_stream": True}
    assert calls.seen == [flags, flags]
    assert manager.handle is None and manager.dispatched_indices is None


def _async(rank, num_ranks, group):
    for wanted in (False, True):
        calls = Calls()
        made = _make(
            "deepep", group, moe_deepep_async_dispatch=wanted, moe_share_token_dispatcher=False
        )
        made._comm_manager._fused_dispatch = calls.dispatch
        made._comm_manager._fused_combine = calls.combine
        rows, _, _ = made.token_permutation2(
            torch.ones(2, H), 2, torch.ones(2, 1), torch.tensor([[0], [1]])
        )
        made.token_unpermutation(rows)
        seen = [flags["async_finish"] for flags in calls.seen]
        assert seen == [wanted, wanted]


def test_async_dispatch_is_a_setting(ranks):
    ranks(_async, 2)


def test_missing_functions_are_named(monkeypatch):
    from weft.dispatcher import _HybridEPManager, manager

    monkeypatch.setattr(manager, "backend", lambda name: manager.Backend(None, None, None))
    with pytest.raises(ImportError, match="Neither DeepEP nor UCCL-EP is installed."):
        _DeepepManager(None, 2)
    with pytest.raises(ImportError, match="DeepEP is not installed."):
        _DeepepManager(None, 2, config=object())
    with pytest.raises(ImportError, match="HybridEP is not installed."):
        _HybridEPManager(None, 2, 4, 2)


def test_metadata_processor_drops_missing_choices():
    processor = _HybridEPMetadataProcessor(num_experts=4, permute_fusion=False)
    routing_map, probs = processor(
        torch.tensor([[1, -1], [-1, -1], [3, 0]]), torch.full((3, 2), 0.5, dtype=torch.bfloat16)
    )
    assert routing_map.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]
    assert probs.dtype == torch.float32 and torch.equal(probs, routing_map * 0.5)


@pytest.mark.parametrize(
    "indices, wanted",
    [
        ([[0, 2], [1, 3]], [[0.25, 0, 0.5, 0], [0, 0.25, 0, 0.5]]),
        ([[2], [0]], [[0, 0, 0.25, 0], [0.25, 0, 0, 0]]),
        ([[-1, -1]], [[0, 0, 0, 0]]),
        ([[-1, 3], [1, -1]], [[0, 0, 0, 0.5], [0, 0.25, 0, 0]]),
    ],
    ids=["two", "one", "none", "some"],
)
def test_a_manager_makes_flags_of_choices(indices, wanted):
    manager = _DeepepManager(None, 2, num_experts=8, num_local_experts=4)
    indices = torch.tensor(indices)
    probs = torch.tensor([0.25, 0.5])[: indices.shape[1]].expand(indices.shape)
    routing_map, spread = manager._indices_to_multihot(indices, probs)
    assert spread.tolist() == wanted and spread.dtype == torch.float32
    assert torch.equal(routing_map, spread != 0) and routing_map.dtype == torch.bool
