# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's AutoEP, as it comes from PyPI, over Weft's ElasticBuffer: its transport "deepep"
alone against a dense layer, and whole training steps against those of its transport "comm"."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft.compat
from packages import DEEPSPEED
from ranks import Ranks

VOCABULARY, HIDDEN, EXPERTS, TOPK, LAYERS, STEPS = 64, 64, 8, 2, 2, 3
SECONDS = 240.0  # that a call may take; the first ones import DeepSpeed

if not DEEPSPEED.exists():
    pytest.skip(f"no {DEEPSPEED} (make consumers makes it)", allow_module_level=True)


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that other tests do not use: they would find packages that are not there for them."""
    pool = Ranks()
    yield pool
    pool.stop()


def deepspeed_over_weft(rank):
    """deepspeed on CPUs, and its module of transports. Its barrier must not name GPUs there, and no
    compiler shall build an operator of its own."""
    if str(DEEPSPEED) not in sys.path:
        sys.path.append(str(DEEPSPEED))
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    weft.compat.install("deep_ep", force=True)
    import deepspeed
    from deepspeed.comm.comm import barrier
    from deepspeed.module_inject import auto_ep_comm

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.barrier = lambda group=None, device_ids=None: barrier(group)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed, auto_ep_comm


# --- the transport alone ---


def factors(experts):
    return (experts % 3 + 1).to(torch.bfloat16)


def sums_are_exact(rank, num_ranks, group, tokens, recomputes):
    _, comm = deepspeed_over_weft(rank)
    sizes = {"num_experts": EXPERTS, "top_k": TOPK, "hidden_size": HIDDEN}
    exchange = comm.shared_exchange(
        comm.new_exchange_scope(), group, **sizes, num_max_tokens_per_rank=max(tokens)
    )
    replay = comm.DeepEPCheckpointReplay()
    maker = torch.Generator().manual_seed(rank)

    def drawn():
        values = torch.randint(-2, 3, (tokens[rank], HIDDEN), generator=maker)
        return values.to(torch.bfloat16)

    x, grad = drawn().requires_grad_(), drawn()
    ids = torch.rand(tokens[rank], EXPERTS, generator=maker).topk(TOPK).indices
    weights = torch.tensor([1.0, 0.5]).expand(tokens[rank], -1).clone().requires_grad_()

    def layer(x, weights):
        """Experts multiply by a number of theirs."""
        rows, given, _ = comm.deepep_dispatch(exchange, x, ids, weights, replay)
        handle = exchange.last_handle
        assert rows.size(0) == given.size(0) == handle.num_expanded_tokens
        ends = handle.psum_num_recv_tokens_per_expert
        local = torch.searchsorted(ends, torch.arange(rows.size(0)), right=True)
        by = factors(rank * (EXPERTS // num_ranks) + local) * given
        return comm.deepep_combine(exchange, (rows * by.unsqueeze(1)).to(rows.dtype), handle)

    out = checkpoint(layer, x, weights, use_reentrant=False) if recomputes else layer(x, weights)
    out.backward(grad)
    by = factors(ids) * weights.detach()
    assert torch.equal(out.float(), x.detach().float() * by.sum(1, keepdim=True))
    assert torch.equal(x.grad.float(), grad.float() * by.sum(1, keepdim=True))
    dots = (x.detach().float() * grad.float()).sum(1, keepdim=True)
    assert torch.equal(weights.grad, dots * factors(ids))
    exchange.release()
    assert exchange.destroyed


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tokens", [(16, 16), (16, 5), (7, 0)], ids=str)
def test_sums_and_gradients_are_those_of_a_dense_layer(own_ranks, tokens, recomputes):
    own_ranks(sums_are_exact, 2, tokens, recomputes, seconds=SECONDS)


# --- whole steps ---


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 64, HIDDEN) / 8)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 32) / 8)


class Layer(nn.Module):
    """Its experts have the names and shapes by which DeepSpeed finds those of Qwen3-MoE. Nothing
    but what DeepSpeed puts in their place computes."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.mlp.experts = Experts()


class Model(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.config = SimpleNamespace(num_experts=EXPERTS, num_experts_per_tok=TOPK)
        self.model = nn.Module()
        self.model.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        x = self.model.embed(ids)
        for layer in self.model.layers:
            if self.recomputes:
                x = x + checkpoint(layer.mlp, x, use_reentrant=False)
            else:
                x = x + layer.mlp(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def trained(deepspeed, rank, num_ranks, backend, stage, recomputes):
    """The losses of some steps, and the gradients of each."""
    torch.manual_seed(0)
    model = Model(recomputes)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "expert_parallel": {
            "enabled": True,
            "autoep_size": num_ranks,
            "preset_model": "qwen3_moe",
            "comm_backend": backend,
            "comm_max_tokens_per_rank": 32,
            "use_grouped_mm": False,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses, gradients = [], []
    for step in range(STEPS):
        maker = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(VOCABULARY, (2, 8 + 4 * rank), generator=maker)
        loss = engine(ids)
        engine.backward(loss)
        for name, parameter in model.named_parameters():
            found = deepspeed.utils.safe_get_full_grad(parameter)
            gradients.append((f"step {step}: {name}", found.float().clone()))
        engine.step()
        losses.append(loss.item())
    exchanges = [layer.mlp._deepep_exchange for layer in model.model.layers]
    engine.destroy()
    return losses, gradients, exchanges


def trains_as_without(rank, num_ranks, group, stage, recomputes):
    deepspeed, _ = deepspeed_over_weft(rank)
    given = rank, num_ranks
    want, wanted, none = trained(deepspeed, *given, "comm", stage, recomputes)
    got, found, exchanges = trained(deepspeed, *given, "deepep", stage, recomputes)
    assert none == [None] * LAYERS
    assert len(set(exchanges)) == 1 and exchanges[0].destroyed
    assert isinstance(exchanges[0].buffer, weft.compat.deep_ep.ElasticBuffer)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=0.0)
    assert want[-1] < want[0]
    for (name, gradient), (same, expected) in zip(found, wanted, strict=True):
        assert name == same
        off = (gradient - expected).norm() / expected.norm()
        assert off < 0.05, f"{name}: {off}"
    dist.barrier(group)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_are_those_over_all_to_all(own_ranks, stage, recomputes):
    own_ranks(trains_as_without, 2, stage, recomputes, seconds=SECONDS)
