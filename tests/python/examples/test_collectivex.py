# SPDX-License-Identifier: Apache-2.0
"""Weft's backend of CollectiveX, by what its driver and its oracle ask of one."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import device_of

FILE = Path(__file__).resolve().parents[3] / "examples/benchmarks/collectivex/ep_weft.py"
EXPERTS, TOPK, HIDDEN = 8, 3, 128
LADDER = (16, 1, 5)  # tokens of a rank, one shape after the other


class EPBackend:
    """The class of CollectiveX from which its adapters derive, as far as they need it."""

    def __init__(self, args, rank, world_size, local_rank, device):
        del local_rank
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.mode = args.mode
        assert self.mode in self.SUPPORTED_MODES

    def finalize(self, rc):
        dist.barrier()
        return rc


def backend_class():
    stub = types.ModuleType("ep_backend")
    stub.EPBackend = EPBackend
    sys.modules["ep_backend"] = stub
    try:
        spec = importlib.util.spec_from_file_location("ep_weft", FILE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["ep_backend"]
    return module.WeftBackend


def problem_of(rank, tokens, device):
    maker = torch.Generator().manual_seed(100 * tokens + rank)
    x = torch.randint(-8, 8, (tokens, HIDDEN), generator=maker).to(torch.bfloat16)
    idx = torch.rand(tokens, EXPERTS, generator=maker).topk(TOPK).indices
    weights = torch.tensor([0.5, 0.25, 0.25]).expand(tokens, -1).contiguous()
    return types.SimpleNamespace(
        T=tokens,
        x=x.to(device),
        dispatch_x=x.to(device),
        topk_idx=idx.to(device),
        topk_weights=weights.to(device),
    )


def factor(expert):
    return expert % 4 + 1


def run(rank, num_ranks, _group, mode):
    device = device_of(rank)
    args = types.SimpleNamespace(mode=mode, experts=EXPERTS, hidden=HIDDEN, topk=TOPK)
    backend = backend_class()(args, rank, num_ranks, rank, device)
    assert backend.buffer_cap(args) is None or backend.buffer_cap(args) >= max(LADDER)
    spec = types.SimpleNamespace(
        hidden=HIDDEN, experts=EXPERTS, topk=TOPK, max_tokens_per_rank=max(LADDER)
    )
    backend.create_buffer(spec)
    local, is_decode = EXPERTS // num_ranks, mode == "low-latency"
    for tokens in LADDER:
        everybody = [problem_of(source, tokens, "cpu") for source in range(num_ranks)]
        problem = problem_of(rank, tokens, device)
        handle = backend.dispatch(problem)
        backend.stage(problem, handle)
        out = backend.combine(problem, handle)
        chosen = problem.topk_idx
        times = (
            1
            if is_decode
            else torch.stack([(chosen // local == one).any(1) for one in range(num_ranks)])
            .sum(0)
            .unsqueeze(1)
        )
        assert torch.equal(out, problem.x * times)

        view = backend.inspect_dispatch(problem, handle)
        assert len(view.payload) == backend.recv_tokens(handle)
        here = range(rank * local, (rank + 1) * local)
        counts = [sum(int((one.topk_idx == e).sum()) for one in everybody) for e in here]
        assert view.local_expert_counts.tolist() == counts
        found = sorted(zip(view.payload.tolist(), view.expert_ids.tolist()))
        want = []
        for one in everybody:
            for row, experts in zip(one.x.tolist(), one.topk_idx.tolist()):
                kept = [e if e in here else -1 for e in experts]
                if is_decode:
                    want += [(row, e) for e in experts if e in here]
                elif max(kept) >= 0:
                    want.append((row, kept))
        assert found == sorted(want)

        ids = view.expert_ids
        if is_decode:
            transformed = view.payload * factor(ids).unsqueeze(1)
        else:
            share = torch.where(ids >= 0, view.weights * factor(ids), 0).sum(1, keepdim=True)
            transformed = (view.payload * share).to(torch.bfloat16)
        out = backend.combine_transformed(problem, handle, transformed)
        expected = problem.x * (problem.topk_weights * factor(chosen)).sum(1, keepdim=True)
        assert torch.allclose(out.float(), expected.float(), rtol=0.02)
    assert backend.finalize(0) == 0


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_backend_gives_what_the_oracle_expects(ranks, num_ranks, mode):
    ranks(run, num_ranks, mode)
