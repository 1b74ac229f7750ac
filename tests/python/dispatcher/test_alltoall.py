# SPDX-License-Identifier: Apache-2.0
"""The dispatcher over torch.distributed: against the dense layer."""

import dispatcher_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from weft.dispatcher import DispatcherConfig, MoEAlltoAllTokenDispatcher, get_capacity

E, H, K = 8, 16, 2
GRIDS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]


def _identity(rank, num_ranks, group, tp, ep, dtype):
    with cases.groups(tp, ep) as g:
        made = cases.dispatcher("alltoall", g, DispatcherConfig(num_moe_experts=E))
        case = cases.routing(rank, 24, H, E, K, dtype=dtype)
        x = case.x.reshape(6, 4, H).requires_grad_()
        probs = torch.full((24, E), 1 / K)
        out, counts = cases.run(made, x, case.routing_map, probs, cases.weigh)
        assert out.shape == x.shape and out.dtype == dtype
        torch.testing.assert_close(out / tp, x)
        out.backward(x.detach())
        torch.testing.assert_close(x.grad / tp, x)
        assert counts.device.type == "cpu" and counts.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp,ep", GRIDS)
def test_identity_experts_return_the_tokens(ranks, tp, ep, dtype):
    ranks(_identity, tp * ep, tp, ep, dtype)


def _dense(rank, num_ranks, group, tp, ep, num_tokens, unrouted):
    with cases.groups(tp, ep) as g:
        made = cases.dispatcher("alltoall", g, DispatcherConfig(num_moe_experts=E))
        all_cases = [
            cases.routing(r, num_tokens[r], H, E, K, unrouted=unrouted) for r in range(num_ranks)
        ]
        weights = cases.Experts(9, E, H, 8)
        cases.check_against_dense(made, "alltoall", tp, ep, all_cases, weights)


@pytest.mark.parametrize(
    "num_tokens,unrouted",
    [((16,) * 4, 0.0), ((16,) * 4, 1.0), ((7, 0, 33, 1), 0.5), ((0,) * 4, 0.0)],
)
@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 1), (1, 4), (2, 2)])
def test_equals_the_dense_layer(ranks, tp, ep, num_tokens, unrouted):
    ranks(_dense, tp * ep, tp, ep, num_tokens, unrouted)


def _row_order(rank, num_ranks, group, tp, ep):
    with cases.groups(tp, ep) as g:
        made = cases.dispatcher("alltoall", g, DispatcherConfig(num_moe_experts=E))
        all_cases = [cases.routing(r, 5 + r, H, E, K) for r in range(num_ranks)]
        case = all_cases[rank]
        hidden, probs = made.dispatch_preprocess(case.x, case.routing_map, case.probs)
        rows, counts, probs = made.dispatch_postprocess(*made.token_dispatch(hidden, probs))
        expected = [
            (source, t, e)
            for e in made.local_expert_indices
            for source in [e_ * tp + t_ for t_ in range(tp) for e_ in range(ep)]
            for t in all_cases[source].routing_map[:, e].nonzero().flatten().tolist()
        ]
        assert torch.equal(rows, torch.stack([all_cases[s].x[t] for s, t, _ in expected]))
        assert probs.tolist() == [all_cases[s].probs[t, e].item() for s, t, e in expected]
        assert counts.tolist() == [
            sum(e == own for _, _, e in expected) for own in made.local_expert_indices
        ]


@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 2)])
def test_rows_are_by_expert_then_source_then_token(ranks, tp, ep):
    ranks(_row_order, tp * ep, tp, ep)


def _drop(routing_map, capacity):
    """Routes that a router with a capacity keeps: the first tokens of each expert."""
    return routing_map & (routing_map.cumsum(0) <= capacity)


def _capacity(rank, num_ranks, group, tp, ep, factor):
    num_tokens = 16
    capacity = get_capacity(num_tokens * K, E, factor)
    all_cases = [cases.routing(r, num_tokens, H, E, K) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    keep = [_drop(c.routing_map, capacity) for c in all_cases]
    dropped = [cases.Routing(c.x, k, c.probs * k) for c, k in zip(all_cases, keep)]
    with cases.groups(tp, ep) as g:
        config = DispatcherConfig(num_moe_experts=E, moe_expert_capacity_factor=factor)
        made = cases.dispatcher("alltoall", g, config)
        out, counts = cases.check_against_dense(made, "capacity", tp, ep, dropped, weights)
        assert (counts <= capacity * tp * ep).all()

        config.moe_pad_expert_input_to_capacity = True
        padded = cases.dispatcher("alltoall", g, config)
        padded_out, counts = cases.check_against_dense(
            padded, "drop and pad", tp, ep, dropped, weights
        )
        assert (counts == capacity * tp * ep).all()
        torch.testing.assert_close(padded_out, out)
        # The same from a map that was not limited before: the first tokens stay.
        cases.check_against_dense(padded, "drop and pad", tp, ep, all_cases, weights, keep=keep)


@pytest.mark.parametrize("factor", [0.5, 1.0, 6.0])
@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 1), (2, 2)])
def test_capacity_with_and_without_padding(ranks, tp, ep, factor):
    ranks(_capacity, tp * ep, tp, ep, factor)


def _router_padding(rank, num_ranks, group, tp, ep):
    all_cases = [cases.routing(r, 40, H, E, K) for r in range(num_ranks)]
    weights = cases.Experts(9, E, H, 8)
    with cases.groups(tp, ep) as g:
        config = DispatcherConfig(num_moe_experts=E)
        plain = cases.dispatcher("alltoall", g, config)
        out, _ = cases.check_against_dense(plain, "plain", tp, ep, all_cases, weights)
        config.fp8, config.moe_router_padding_for_quantization = "hybrid", True
        padded = cases.dispatcher("alltoall", g, config)
        before = all_cases[rank].routing_map.clone()
        padded_out, counts = cases.check_against_dense(padded, "padded", tp, ep, all_cases, weights)
        assert (counts % 16 == 0).all()
        torch.testing.assert_close(padded_out, out)
        assert torch.equal(all_cases[rank].routing_map, before), "the caller's map was changed"


@pytest.mark.parametrize("tp,ep", [(1, 2), (2, 2)])
def test_router_padding_changes_counts_alone(ranks, tp, ep):
    ranks(_router_padding, tp * ep, tp, ep)


def _checkpointed(rank, num_ranks, group, tp, ep):
    with cases.groups(tp, ep) as g:
        made = cases.dispatcher("alltoall", g, DispatcherConfig(num_moe_experts=E))
        case = cases.routing(rank, 10, H, E, K)
        w1, w2 = cases.Experts(9, E, H, 8).shard(slice(0, made.num_local_experts), tp, 0)

        def layer(x, probs):
            return cases.run(made, x, case.routing_map, probs, cases.grouped(w1, w2))[0]

        grads = []
        for run in (layer, lambda x, p: checkpoint(layer, x, p, use_reentrant=False)):
            x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
            (run(x, probs) ** 2).sum().backward()
            grads.append([t.grad.clone() for t in (x, probs, w1, w2)])
            w1.grad = w2.grad = None
        assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_runs_under_activation_checkpointing(ranks):
    ranks(_checkpointed, 4, 2, 2)


class SharedExperts:
    """Notes the calls; its output is its input times 3."""

    def __init__(self):
        self.calls = []

    def wait_current_stream(self):
        self.calls.append("wait")

    def pre_forward_comm(self, x, wait_current_stream=True):
        self.calls.append("pre")
        self.x = x

    def linear_fc1_forward_and_act(self, overlapped):
        self.calls.append("fc1")

    def linear_fc2_forward(self, overlapped):
        self.calls.append("fc2")

    def post_forward_comm(self):
        self.calls.append("post")

    def get_output(self):
        self.calls.append("output")
        return self.x * 3


def _shared_experts(rank, num_ranks, group):
    with cases.groups(1, 2) as g:
        config = DispatcherConfig(num_moe_experts=E)
        made = cases.dispatcher("alltoall", g, config)
        with pytest.raises(AssertionError, match="moe_shared_expert_overlap"):
            made.set_shared_experts(SharedExperts())
        config.moe_shared_expert_overlap = True
        made.set_shared_experts(SharedExperts())
        assert made.use_nccl_stream
        case = cases.routing(rank, 6, H, E, K)
        out, _ = cases.run(
            made, case.x.reshape(2, 3, H), case.routing_map, torch.full((6, E), 1 / K), cases.weigh
        )
        torch.testing.assert_close(out, case.x.reshape(2, 3, H) * 4)
        assert made.shared_experts.calls == ["pre", "fc1", "fc2", "post", "output"]


def test_shared_experts_run_beside_the_exchange(ranks):
    ranks(_shared_experts, 2)


def _fp64(rank, num_ranks, group):
    with cases.groups(2, 1) as g:
        made = cases.dispatcher("alltoall", g, DispatcherConfig(num_moe_experts=E))
        case = cases.routing(rank, 6, H, E, K)
        hidden, probs = made.dispatch_preprocess(case.x, case.routing_map, case.probs.double())
        rows, _, probs = made.dispatch_postprocess(*made.token_dispatch(hidden, probs))
        assert probs.dtype == torch.float64
        assert made.combine_preprocess(rows).dtype == torch.float32


def test_probabilities_keep_their_dtype(ranks):
    ranks(_fp64, 2)


def _wrong_inputs(rank, num_ranks, group):
    config = DispatcherConfig(num_moe_experts=E)
    with cases.groups(1, 2) as g:
        made = cases.dispatcher("alltoall", g, config)
        x, m, p = torch.zeros(3, H), torch.zeros(3, E, dtype=torch.bool), torch.zeros(3, E)
        for arguments, text in (
            ((x, m, p[0]), "Expected 2D tensor for probs"),
            ((x, m[0], p), "Expected 2D tensor for token2expert mask"),
            ((x, m.long(), p), "Expected bool tensor for mask"),
        ):
            with pytest.raises(AssertionError, match=text):
                made.dispatch_preprocess(*arguments)
        for indices, text in (([0, 1], "Invalid local"), ([0, 1, 2, 4], "continuous")):
            with pytest.raises(AssertionError, match=text):
                MoEAlltoAllTokenDispatcher(4, indices, config, g)
        with pytest.raises(TypeError, match="has no groups"):
            MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], config, object())
        config.moe_pad_expert_input_to_capacity = True
        with pytest.raises(AssertionError, match="needs moe_expert_capacity_factor"):
            MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], config, g)


def test_wrong_inputs_are_named(ranks):
    ranks(_wrong_inputs, 2)


def _one_group(rank, num_ranks, group):
    """A process group alone is the expert-parallel group."""
    local = E // num_ranks
    made = MoEAlltoAllTokenDispatcher(
        local,
        list(range(rank * local, (rank + 1) * local)),
        DispatcherConfig(num_moe_experts=E),
        dist.group.WORLD,
    )
    assert (made.tp_size, made.ep_size) == (1, num_ranks)
    case = cases.routing(rank, 4, H, E, K)
    out, _ = cases.run(made, case.x, case.routing_map, torch.full((4, E), 1 / K), cases.weigh)
    torch.testing.assert_close(out, case.x)
    assert made.get_expert_zero_copy_buffers() == (None, None)


def test_takes_a_process_group(ranks):
    ranks(_one_group, 2)
