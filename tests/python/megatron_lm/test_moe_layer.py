# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own MoE layer, as it comes from PyPI, over Weft: what docs/megatron.md promises.

Its router, layer and dispatcher run unchanged, on GPUs where there are any; experts are products of
this file, and what is expected is computed densely, on the CPU, from everybody's tokens.
"""

import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from packages import skip_without, wheel
from ranks import device_of

skip_without("megatron", "megatron-core")

HIDDEN, WIDTH, EXPERTS, TOPK = 64, 32, 8, 2
ON_GPU = torch.cuda.is_available()
TOLERANCE = 1e-4 if ON_GPU else 1e-5  # there products add up in another order


def expert_weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(1000 + expert)
    up = torch.randn(HIDDEN, WIDTH, generator=maker) / HIDDEN**0.5
    return up, torch.randn(WIDTH, HIDDEN, generator=maker) / WIDTH**0.5


def inputs(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, 1, H] and the gradient of the output."""
    maker = torch.Generator().manual_seed(rank)
    shape = (num_tokens, 1, HIDDEN)
    return torch.randn(shape, generator=maker), torch.randn(shape, generator=maker)


class Experts(nn.Module):
    """Megatron's interface: rows by expert, their numbers, their probabilities -> (rows, bias)."""

    def __init__(self, num_local, config, pg_collection=None, name=None):
        super().__init__()
        first = pg_collection.ep.rank() * num_local
        made = [expert_weights(first + i) for i in range(num_local)]
        self.up = nn.Parameter(torch.stack([up for up, _ in made]))
        self.down = nn.Parameter(torch.stack([down for _, down in made]))

    def forward(self, rows, counts, probs):
        parts = rows.split(counts.tolist())
        out = [functional.gelu(p @ up) @ down for p, up, down in zip(parts, self.up, self.down)]
        return torch.cat(out) * probs.unsqueeze(-1), None


def megatron(how: str):
    """Its modules: over Weft's deep_ep ("names"), with weft.fused_a2a in place of its module
    ("module"), or with Weft's dispatcher in place of its own. Until the call of the rank ends."""
    import over_weft
    from megatron.core import process_groups_config
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_layer

    import weft.dispatcher

    over_weft.forget_buffer_after_call()
    if how == "module":
        over_weft.replace_fused_a2a()
    if how == "dispatcher":
        found = weft.dispatcher.MoEFlexTokenDispatcher
        over_weft.replace(moe_layer, "MoEFlexTokenDispatcher", found)
    return process_groups_config, transformer_config, moe_layer


def run_layer(rank, num_ranks, group, backend, how, num_tokens, settings):
    """-> output, gradients of x, of the router's weight and of this rank's experts."""
    device = device_of(rank)
    torch.set_float32_matmul_precision("highest")  # some containers ask for less
    groups_module, config_module, layers = megatron(how)
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    groups = groups_module.ProcessGroupCollection()
    groups.ep = groups.tp_ep = group
    for name in ("tp", "cp", "expt_tp", "expt_dp", "tp_cp", "tp_dp_cp"):
        setattr(groups, name, alone)
    config = config_module.TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        expert_model_parallel_size=num_ranks,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **settings,
    )
    submodules = layers.MoESubmodules(experts=Experts)
    layer = layers.MoELayer(config, submodules, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        maker = torch.Generator().manual_seed(7)
        layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=maker))
    layer.to(device)
    x, grad = (tensor.to(device) for tensor in inputs(rank, num_tokens[rank]))
    x.requires_grad_()
    if not num_tokens[rank]:  # Megatron-Core's router cannot do without a token
        nothing = torch.zeros(0, EXPERTS, device=device) * layer.router.weight.sum()
        layer.router.forward = lambda *_, **__: (nothing, nothing.bool())
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(disable=True))  # it would take long
        if not ON_GPU:  # the router stays here
            stack.enter_context(patch.object(torch.cuda, "current_device", lambda: "cpu"))
        out, bias = layer(x)
        assert bias is None
        out.backward(grad)
    grads = (x.grad, layer.router.weight.grad, layer.experts.up.grad, layer.experts.down.grad)
    found = [tensor.detach().to("cpu", copy=True) for tensor in (out, *grads)]
    return found, layer.router.weight.detach().cpu()


def expected(rank: int, num_ranks: int, num_tokens: list[int], router: torch.Tensor):
    """Output and gradients of `run_layer` by the definition, with every expert here."""
    weights = [expert_weights(expert) for expert in range(EXPERTS)]
    up, down = (torch.stack(part).requires_grad_() for part in zip(*weights))
    for source in range(num_ranks):
        x, grad = inputs(source, num_tokens[source])
        x.requires_grad_()
        matrix = router.clone().requires_grad_()
        best = (x @ matrix.T).topk(TOPK)
        probs = torch.zeros(*x.shape[:2], EXPERTS)
        probs = probs.scatter(-1, best.indices, best.values.softmax(-1))
        every = functional.gelu(torch.einsum("tbh,ehw->tbew", x, up))
        out = torch.einsum("tbew,ewh,tbe->tbh", every, down, probs)
        out.backward(grad)
        if source == rank:
            own = [out.detach(), x.grad, matrix.grad]
    local = EXPERTS // num_ranks
    mine = slice(rank * local, (rank + 1) * local)
    return [*own, up.grad[mine], down.grad[mine]]


@pytest.mark.parametrize("how", ["names", "dispatcher"])
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@pytest.mark.parametrize("num_tokens", [[4, 9], [33, 1], [0, 5]])
def test_layer_gives_what_dense_experts_give(ranks, num_tokens, backend, how):
    found = ranks(run_layer, 2, backend, how, num_tokens, {})
    for rank, (tensors, router) in enumerate(found):
        for tensor, wanted in zip(tensors, expected(rank, 2, num_tokens, router), strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=TOLERANCE, atol=TOLERANCE)


CAPACITY = {"moe_expert_capacity_factor": 1.0}


@pytest.mark.parametrize(
    "backend, settings",
    [
        ("deepep", {}),
        ("deepep", CAPACITY),
        ("hybridep", {}),
        ("hybridep", CAPACITY),
        ("hybridep", CAPACITY | {"moe_pad_expert_input_to_capacity": True}),
    ],
)
def test_both_ways_give_the_same_bits(ranks, backend, settings):
    ways = [ranks(run_layer, 2, backend, how, [8, 8], settings) for how in ("names", "dispatcher")]
    for (one, _), (other, _) in zip(*ways, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_newer(rank, num_ranks, group, folder, *given):
    if folder not in sys.path:
        sys.path.insert(0, folder)
    tensors, router = run_layer(rank, num_ranks, group, *given)
    from megatron import core

    assert core.__file__.startswith(folder)
    # This core has changed how tensors travel.
    return [t.tolist() for t in tensors], router.tolist()


NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="its back end hybridep makes a tensor on a GPU")


@pytest.mark.parametrize(
    "backend, how",
    [
        ("deepep", "names"),
        ("deepep", "dispatcher"),
        pytest.param("hybridep", "names", marks=NEEDS_GPU),
        ("hybridep", "dispatcher"),
        ("ncclep", "module"),
        ("ncclep", "dispatcher"),
    ],
)
@pytest.mark.parametrize("num_tokens", [[4, 9], [0, 5]])
def test_newer_layer_gives_what_dense_experts_give(newer_ranks, num_tokens, backend, how):
    if how == "module" and 0 in num_tokens:
        pytest.skip("Megatron-Core sizes a rank's buffer by its own tokens at its first call")
    settings = {"moe_expert_rank_capacity_factor": 2.0} if backend == "ncclep" else {}
    given = (str(wheel("megatron-core 0.19.2")), backend, how, num_tokens, settings)
    for rank, (lists, router) in enumerate(newer_ranks(run_newer, 2, *given)):
        wanted = expected(rank, 2, num_tokens, torch.tensor(router))
        for found, dense in zip(lists, wanted, strict=True):
            tensor = torch.tensor(found).view(dense.shape)  # a list of none has lost it
            torch.testing.assert_close(tensor, dense, rtol=TOLERANCE, atol=TOLERANCE)


def staged(rank, num_ranks, group, folder):
    """The gradient of received rows takes the way of Megatron's 1F1B with a zero copy."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from megatron.core.pipeline_parallel.utils import StageDispatchBwdGrad

    from weft.dispatcher import DispatcherConfig, DispatcherGroups, MoEFlexTokenDispatcher

    config = DispatcherConfig(
        num_moe_experts=EXPERTS,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="ncclep",
        moe_expert_rank_capacity_factor=2.0,
        moe_experts_ignore_unused_rows=True,
        moe_ncclep_zero_copy=True,
    )
    local = EXPERTS // num_ranks
    mine = list(range(rank * local, (rank + 1) * local))
    groups = DispatcherGroups(group, None, group)
    made = MoEFlexTokenDispatcher(local, mine, config.validate(), groups)
    routing_map = torch.zeros(6, EXPERTS, dtype=torch.bool)
    routing_map[:, [1, EXPERTS - 1]] = True
    grads = []
    for stage in (lambda rows, _: rows, StageDispatchBwdGrad.apply):
        x = inputs(rank, 6)[0].view(6, HIDDEN).requires_grad_()
        hidden, probs = made.dispatch_preprocess(x, routing_map, routing_map / 2)
        rows, row_probs = made.token_dispatch(hidden, probs)
        rows = stage(rows, made)
        rows, counts, row_probs = made.dispatch_postprocess(rows, row_probs)
        used = int(counts.sum())
        out = torch.zeros_like(rows)
        out[:used] = rows[:used].square() * row_probs[:used, None]
        out = made.combine_postprocess(made.token_combine(made.combine_preprocess(out)))
        out.backward(inputs(rank, 6)[1].view(6, HIDDEN))
        grads.append(x.grad)
    assert torch.equal(*grads) and grads[0].any()


def test_newer_schedule_may_stage_gradients(newer_ranks):
    newer_ranks(staged, 2, str(wheel("megatron-core 0.19.2")))


def captured(rank, num_ranks, group):
    """Megatron takes these outputs out of a graph of the router and the preprocessing."""
    from megatron.core.transformer.moe.moe_utils import MoECudaGraphPartialCaptureSignal

    from weft.dispatcher import DispatcherConfig, DispatcherGroups, MoEFlexTokenDispatcher

    for backend, routing in (("deepep", "token_indices"), ("hybridep", "routing_map")):
        config = DispatcherConfig(
            num_moe_experts=EXPERTS,
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend=backend,
        )
        groups = DispatcherGroups(group, None, group)
        made = MoEFlexTokenDispatcher(EXPERTS, list(range(EXPERTS)), config, groups)
        x = inputs(rank, 6)[0].view(6, HIDDEN)
        routing_map = torch.zeros(6, EXPERTS, dtype=torch.bool)
        routing_map[:, :TOPK] = True
        for _ in range(2):
            hidden, probs = made.dispatch_preprocess(x, routing_map, routing_map / TOPK)
            given = {"hidden_states": hidden, "probs": probs}
            layer = SimpleNamespace(token_dispatcher=made)
            signal = MoECudaGraphPartialCaptureSignal(layer, "preprocess", **given)
            outputs = signal.get_early_return_outputs(x, None)
            kept = (hidden, probs, made._comm_manager.token_probs)
            wanted = [*kept, getattr(made._comm_manager, routing)]
            assert all(one is other for one, other in zip(outputs, wanted, strict=True))
        names = ["_comm_manager.token_probs", f"_comm_manager.{routing}"]
        assert made.valid_cudagraph_attrs == names


def test_graphs_of_the_preprocessing_find_what_they_keep(ranks):
    ranks(captured, 1)
