# SPDX-License-Identifier: Apache-2.0
"""Every interface on a GPU against itself on the CPU: the executors promise the same bits.

Ranks share the GPUs that there are.
"""

import pytest
import torch
from call_cases import CASES, HIDDEN, ONE_HOST, TIMEOUT, Inputs, domains_of

import weft
from weft import fused_a2a
from weft.compat.deep_ep.layout import Hosts, layout_of, spread

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def both(rank, num_ranks, group, name):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    results = []
    for where in (torch.device("cpu"), device):
        results.append(
            [
                t.detach().cpu()
                for t in (CASES | ONE_HOST)[name](group, Inputs(rank, num_ranks, where))
            ]
        )
        fused_a2a.free_buffer()
        fused_a2a.reset_hybrid_ep_buffer()
        fused_a2a._uccl_buffer = None
    for i, (cpu, gpu) in enumerate(zip(*results, strict=True)):
        assert_same(cpu, gpu, f"result {i} of {name}")


def assert_same(cpu, gpu, what):
    assert (cpu.dtype, cpu.shape) == (gpu.dtype, gpu.shape), what
    if not torch.equal(cpu, gpu):
        differ = (cpu.float() != gpu.float()).nonzero()
        first = tuple(differ[0].tolist())
        raise AssertionError(
            f"{what}, {list(cpu.shape)}: {len(differ)} elements differ, in rows "
            f"{differ[:, 0].unique().tolist()[:20]}; at {first}: {cpu[first]}, not {gpu[first]}"
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "domains"),
    [
        (0, 2, 8, [[0, 1]]),
        (1, 1, 1, [[0]]),
        (1000, 8, 256, [[0]]),
        (5000, 8, 256, [list(range(8)), list(range(8, 16))]),
        (333, 32, 4096, [list(range(64))]),
    ],
)
def test_routings_are_counted_as_on_the_cpu(num_tokens, topk, num_experts, domains, dtype):
    hosts = Hosts(domains, 0)
    gen = torch.Generator().manual_seed(num_tokens)
    idx = torch.randint(-2, num_experts + 2, (num_tokens, topk), generator=gen).to(dtype)
    for here, there in zip(
        layout_of(idx, num_experts, hosts), layout_of(idx.cuda(), num_experts, hosts)
    ):
        assert (here is None) == (there is None)
        assert here is None or torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts"), [(0, 2, 8), (1, 1, 1), (4096, 8, 256), (333, 70, 101)]
)
def test_routings_are_spread_as_on_the_cpu(num_tokens, topk, num_experts, dtype):
    gen = torch.Generator().manual_seed(num_tokens)
    idx = torch.randint(-2, num_experts + 2, (num_tokens, topk), generator=gen).to(dtype)
    weights = torch.rand(num_tokens, topk, generator=gen)
    for given in (None, weights):
        here = spread(idx, given, num_experts)
        there = spread(idx.cuda(), None if given is None else given.cuda(), num_experts)
        assert torch.equal(here[0], there[0].cpu())
        assert (given is None) == (there[1] is None)
        assert given is None or torch.equal(here[1], there[1].cpu())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*CASES, *ONE_HOST])
def test_same_bits_as_on_the_cpu(ranks, name, num_ranks):
    ranks(both, num_ranks, name)


def in_domains(rank, num_ranks, group, name, per_domain):
    with domains_of(per_domain, num_ranks) as other:
        both(rank, num_ranks, other, name)


@pytest.mark.parametrize(("num_ranks", "per_domain"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_between_domains(ranks, name, num_ranks, per_domain):
    ranks(in_domains, num_ranks, name, per_domain)


def captured(rank, num_ranks, group, balance):
    """A layer in budget mode, replayed with new routing in the same tensors."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs = Inputs(rank, num_ranks, device, (64,))
    exchange = weft.Exchange(
        group, hidden=HIDDEN, num_experts=inputs.num_experts, device=device, timeout=TIMEOUT
    )

    def layer():
        plan = exchange.plan(inputs.idx, row_budget=1024, balance=balance)
        rows, row_weights, _ = weft.dispatch(plan, inputs.x, inputs.weights)
        scaled = torch.where(row_weights > 0, rows * row_weights.to(rows.dtype), 0)
        return plan, weft.combine(plan, scaled).x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = [layer() for _ in range(3)]  # as many plans as the graph will keep
    torch.cuda.synchronize()
    del warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept, out = layer()
    for seed in range(5):
        fresh = Inputs(rank + 100 * seed, num_ranks, device, (64,))
        inputs.x.copy_(fresh.x)
        inputs.idx.copy_(fresh.idx)
        inputs.weights.copy_(fresh.weights)
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        with torch.cuda.stream(stream):
            _, eager = layer()
        torch.cuda.synchronize()
        assert torch.equal(replayed, eager), f"replay {seed}"
    exchange.check()
    del kept


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("balance", [0, 2])
def test_a_layer_can_be_captured(ranks, num_ranks, balance):
    ranks(captured, num_ranks, balance)
