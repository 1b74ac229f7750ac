# SPDX-License-Identifier: Apache-2.0
"""The dispatcher over Weft: every backend, against the dense layer and the all-to-all."""

import dispatcher_cases as cases
import dispatcher_standins as standins
import pytest
import torch
from test_alltoall import SharedExperts
from torch.utils.checkpoint import checkpoint

from weft.dispatcher import (
    DispatcherConfig,
    DispatcherGroups,
    MoEFlexTokenDispatcher,
    get_capacity,
)

E, H, K = 8, 16, 2
BACKENDS = ["deepep", "hybridep", "uccl_ep"]
GRIDS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]

pytestmark = pytest.mark.parametrize("functions", standins.installed())


def _identity(rank, num_ranks, group, functions, backend, tp, ep, dtype):
    standins.use(functions)
    with cases.groups(tp, ep) as g:
        made = cases.dispatcher(backend, g, DispatcherConfig(num_moe_experts=E))
        case = cases.routing(rank, 24, H, E, K, dtype=dtype)
        x = case.x.reshape(6, 4, H).requires_grad_()
        probs = torch.full((24, E), 1 / K)
        out, counts = cases.run(made, x, case.routing_map, probs, cases.weigh)
        assert out.shape == x.shape and out.dtype == dtype and counts.dtype == torch.int64
        torch.testing.assert_close(out / tp, x)
        out.backward(x.detach())
        torch.testing.assert_close(x.grad / tp, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tp,ep", GRIDS)
def test_identity_experts_return_the_tokens(ranks, functions, backend, tp, ep, dtype):
    ranks(_identity, tp * ep, functions, backend, tp, ep, dtype)


def _dense(rank, num_ranks, group, functions, backend, tp, ep, num_tokens, unrouted):
    standins.use(functions)
    all_cases = [
        cases.routing(r, num_tokens[r], H, E, K, unrouted=unrouted) for r in range(num_ranks)
    ]
    weights = cases.Experts(9, E, H, 8)
    with cases.groups(tp, ep) as g:
        config = DispatcherConfig(num_moe_experts=E)
        out, counts = cases.check_against_dense(
            cases.dispatcher(backend, g, config), backend, tp, ep, all_cases, weights
        )
        baseline, baseline_counts = cases.check_against_dense(
            cases.dispatcher("alltoall", g, config), "alltoall", tp, ep, all_cases, weights
        )
        torch.testing.assert_close(out, baseline, rtol=1e-5, atol=1e-6)
        assert counts.tolist() == baseline_counts.tolist()


@pytest.mark.parametrize(
    "num_tokens,unrouted",
    [((12,) * 4, 0.0), ((12,) * 4, 1.0), ((7, 0, 33, 1), 0.5), ((0,) * 4, 0.0)],
)
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 1), (1, 4), (2, 2)])
def test_equals_the_dense_layer(ranks, functions, backend, tp, ep, num_tokens, unrouted):
    ranks(_dense, tp * ep, functions, backend, tp, ep, num_tokens, unrouted)


def _padded_by_the_caller(rank, num_ranks, group, functions, backend):
    """Packed sequences: tokens filled up to 64 without routes are the same tokens."""
    standins.use(functions)
    num_tokens = (17, 5)
    all_cases = [cases.routing(r, num_tokens[r], H, E, K) for r in range(num_ranks)]
    pad = torch.nn.functional.pad
    padded = [
        cases.Routing(*(pad(t, (0, 0, 0, 64 - t.shape[0])) for t in (c.x, c.routing_map, c.probs)))
        for c in all_cases
    ]
    weights = cases.Experts(9, E, H, 8)
    with cases.groups(1, 2) as g:
        config = DispatcherConfig(
            num_moe_experts=E,
            moe_hybridep_pad_uneven_dispatch_inputs=True,
            moe_hybridep_pad_variable_tokens=True,
        )
        made = cases.dispatcher(backend, g, config)
        natural, counts = cases.check_against_dense(made, backend, 1, 2, all_cases, weights)
        out, padded_counts = cases.check_against_dense(made, backend, 1, 2, padded, weights)
        assert torch.equal(out[: num_tokens[rank]], natural)
        assert not out[num_tokens[rank] :].any()
        assert counts.tolist() == padded_counts.tolist()


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_takes_uneven_and_padded_tokens_alike(ranks, functions, backend):
    ranks(_padded_by_the_caller, 2, functions, backend)


def _capacity(rank, num_ranks, group, functions, tp, ep, factor):
    standins.use(functions)
    num_tokens = 16
    capacity = get_capacity(num_tokens * K, E, factor)
    all_cases = [cases.routing(r, num_tokens, H, E, K) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    keep = [c.routing_map & (c.routing_map.cumsum(0) <= capacity) for c in all_cases]
    dropped = [cases.Routing(c.x, k, c.probs * k) for c, k in zip(all_cases, keep)]
    with cases.groups(tp, ep) as g:
        config = DispatcherConfig(num_moe_experts=E, moe_expert_capacity_factor=factor)
        outs = []
        for backend in ("deepep", "hybridep"):
            made = cases.dispatcher(backend, g, config)
            out, counts = cases.check_against_dense(made, backend, tp, ep, dropped, weights)
            assert (counts <= capacity * tp * ep).all()
            outs.append(out)
        config.moe_pad_expert_input_to_capacity = True
        padded = cases.dispatcher("hybridep", g, config)
        for given in (dropped, all_cases):
            out, counts = cases.check_against_dense(
                padded, "drop and pad", tp, ep, given, weights, keep=keep
            )
            outs.append(out)
            assert counts.device.type == "cpu"
            assert (counts == capacity * tp * ep).all()
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0])
        with pytest.raises(ValueError, match="no fixed sizes"):
            cases.dispatcher("deepep", g, config)


@pytest.mark.parametrize("factor", [0.5, 1.0, 6.0])
@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 1), (2, 2)])
def test_capacity_with_and_without_padding(ranks, functions, tp, ep, factor):
    ranks(_capacity, tp * ep, functions, tp, ep, factor)


def _quantised(rank, num_ranks, group, functions, backend, tp, ep, settings, num_tokens):
    standins.use(functions)
    all_cases = [cases.routing(r, num_tokens, H, E, K) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    with cases.groups(tp, ep) as g:
        config = DispatcherConfig(num_moe_experts=E)
        plain = cases.dispatcher(backend, g, config)
        out, counts = cases.check_against_dense(plain, "plain", tp, ep, all_cases, weights)
        for name, value in settings.items():
            setattr(config, name, value)
        made = cases.dispatcher(backend, g, config)
        padded_out, padded = cases.check_against_dense(made, "pad", tp, ep, all_cases, weights)
        torch.testing.assert_close(padded_out, out)
        return counts.tolist(), padded.tolist()


@pytest.mark.parametrize(
    "backend,settings",
    [
        ("hybridep", {"fp8": "hybrid"}),
        ("hybridep", {"fp8": "hybrid", "moe_router_padding_for_quantization": True}),
        ("deepep", {"fp8": "hybrid", "moe_router_padding_for_quantization": True}),
        ("deepep", {"fp8": "hybrid", "moe_permute_fusion": True}),
    ],
)
@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 2)])
def test_blocks_are_padded_for_quantisation(ranks, functions, backend, settings, tp, ep):
    for counts, padded in ranks(_quantised, tp * ep, functions, backend, tp, ep, settings, 40):
        assert padded == [-(-c // 16) * 16 for c in counts]


def test_router_padding_is_left_out_where_rows_are_too_few(ranks, functions):
    settings = {"fp8": "hybrid", "moe_router_padding_for_quantization": True}
    for counts, padded in ranks(_quantised, 2, functions, "deepep", 1, 2, settings, 3):
        assert padded == counts


def _checkpointed(rank, num_ranks, group, functions, backend, settings):
    standins.use(functions)
    with cases.groups(2, 2) as g:
        config = DispatcherConfig(num_moe_experts=E, **settings)
        made = cases.dispatcher(backend, g, config)
        case = cases.routing(rank, 10, H, E, K)
        w1, w2 = cases.Experts(9, E, H, 8).shard(slice(0, made.num_local_experts), 2, 0)

        def layer(x, probs):
            return cases.run(made, x, case.routing_map, probs, cases.grouped(w1, w2))[0]

        grads = []
        for run in (layer, lambda x, p: checkpoint(layer, x, p, use_reentrant=False)):
            x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
            (run(x, probs) ** 2).sum().backward()
            grads.append([t.grad.clone() for t in (x, probs, w1, w2)])
            w1.grad = w2.grad = None
        assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize(
    "backend,settings",
    [
        ("deepep", {}),
        ("hybridep", {}),
        ("hybridep", {"moe_expert_rank_capacity_factor": 3.0}),
        (
            "hybridep",
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        ),
    ],
)
def test_runs_under_activation_checkpointing(ranks, functions, backend, settings):
    ranks(_checkpointed, 4, functions, backend, settings)


def _detached_phases(rank, num_ranks, group, functions, backend):
    """A schedule cuts the graph between phases and runs each part's backward itself."""
    standins.use(functions)
    with cases.groups(1, 2) as g:
        made = cases.dispatcher(backend, g, DispatcherConfig(num_moe_experts=E))
        case = cases.routing(rank, 9, H, E, K)
        x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
        whole, _ = cases.run(made, x, case.routing_map, probs, cases.weigh)
        whole.sum().backward()
        expected = x.grad.clone(), probs.grad.clone()
        x.grad = probs.grad = None

        def cut(*tensors):
            return [t.detach().requires_grad_() for t in tensors]

        a = made.dispatch_preprocess(x, case.routing_map, probs)
        a_in = cut(*a)
        b = made.token_dispatch(*a_in)
        b_in = cut(*b)
        rows, counts, row_probs = made.dispatch_postprocess(*b_in)
        c = made.combine_preprocess(cases.weigh(rows, counts, row_probs))
        (c_in,) = cut(c)
        d = made.token_combine(c_in)
        (d_in,) = cut(d)
        out = made.combine_postprocess(d_in)
        assert torch.equal(out, whole)
        out.sum().backward()
        d.backward(d_in.grad)
        c.backward(c_in.grad)
        torch.autograd.backward(b, [t.grad for t in b_in])
        torch.autograd.backward(a, [t.grad for t in a_in])
        torch.testing.assert_close((x.grad, probs.grad), expected)


@pytest.mark.parametrize("backend", ["alltoall", "deepep", "hybridep"])
def test_phases_work_on_detached_tensors(ranks, functions, backend):
    ranks(_detached_phases, 2, functions, backend)


def _shared_experts(rank, num_ranks, group, functions, backend):
    standins.use(functions)
    with cases.groups(1, 2) as g:
        config = DispatcherConfig(num_moe_experts=E, moe_shared_expert_overlap=True)
        made = cases.dispatcher(backend, g, config)
        made.set_shared_experts(SharedExperts())
        case = cases.routing(rank, 6, H, E, K)
        x = case.x.reshape(2, 3, H)
        probs = torch.full((6, E), 1 / K)
        out, _ = cases.run(made, x, case.routing_map, probs, cases.weigh)
        torch.testing.assert_close(out, x * 4)
        assert made.shared_experts.calls == ["wait", "pre", "fc1", "fc2", "post", "output"]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_shared_experts_run_beside_the_exchange(ranks, functions, backend):
    ranks(_shared_experts, 2, functions, backend)


def _construction(rank, num_ranks, group, functions):
    standins.use(functions)
    with cases.groups(2, 1) as g:
        config = DispatcherConfig(num_moe_experts=E)
        for backend, routing in (("deepep", "token_indices"), ("hybridep", "routing_map")):
            made = cases.dispatcher(backend, g, config)
            assert made._comm_manager.router_topk == 2 * K
            assert made._comm_manager.num_experts == 2 * E
            assert made.cudagraph_attrs == [
                "_comm_manager.token_probs",
                f"_comm_manager.{routing}",
            ]
            assert made.get_expert_zero_copy_buffers() == (None, None)
            assert made.check_over_budget() is None and made.check_required_capacity() is None
            made.reset_over_budget()
            made.invalidate_ep_bootstrap()
        config.moe_flex_dispatcher_backend = "nothing"
        with pytest.raises(ValueError, match="Invalid backend: nothing"):
            MoEFlexTokenDispatcher(E, list(range(E)), config, g)
        config.moe_flex_dispatcher_backend = "deepep"
        with pytest.raises(TypeError, match="tp_ep is None"):
            MoEFlexTokenDispatcher(E, list(range(E)), config, DispatcherGroups(None, None, None))
        with torch.device("meta"):  # as deferred initialisation makes layers
            for kind in ("alltoall", "deepep", "hybridep"):
                cases.dispatcher(kind, g, config)


def test_construction(ranks, functions):
    ranks(_construction, 2, functions)


def _metadata(rank, num_ranks, group, functions):
    """The method has the arguments and results of Megatron-LM and of NeMo Automodel."""
    standins.use(functions)
    with cases.groups(2, 2) as g:
        made = cases.dispatcher("deepep", g, DispatcherConfig(num_moe_experts=4))
        case = cases.routing(5, 3, 16, 4, 2)
        routing_map, probs = made._initialize_metadata(case.routing_map, case.probs)
        for spread, given in ((routing_map, case.routing_map), (probs, case.probs)):
            assert spread.shape == (3, 4, 2) and spread.dtype == given.dtype
            assert spread.is_contiguous()
            for r in range(4):  # ranks of an expert's TP group follow each other
                assert torch.equal(spread[:, r], given[:, r // 2 * 2 : r // 2 * 2 + 2])
        assert torch.equal(made._initialize_metadata(num_local_tokens=3, probs=case.probs), probs)
        assert torch.equal(made._initialize_metadata(3, case.probs), probs)


def test_metadata_of_all_tp_ranks(ranks, functions):
    ranks(_metadata, 4, functions)


def _fused(rank, num_ranks, group, functions):
    standins.use(functions)
    with cases.groups(1, 2) as g:
        case = cases.routing(rank, 9, H, E, K)
        outs = []
        for settings in (
            {},
            {
                "moe_permute_fusion_into_hybridep": True,
                "moe_hybridep_num_blocks_permute": 4,
                "moe_hybridep_num_blocks_unpermute": 4,
                "moe_flex_dispatcher_num_sms": 8,
            },
        ):
            made = cases.dispatcher("hybridep", g, DispatcherConfig(num_moe_experts=E, **settings))
            x = case.x.clone().requires_grad_()
            out, _ = cases.run(made, x, case.routing_map, case.probs, cases.weigh)
            out.sum().backward()
            outs.append((out.detach(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*outs))


def test_fused_permutes_give_the_same_bits(ranks, functions):
    if functions != "weft":
        pytest.skip("the stand-ins have no fused permutes")
    ranks(_fused, 2, functions)
