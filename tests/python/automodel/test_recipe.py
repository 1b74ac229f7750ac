# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's benchmark recipe as it comes from PyPI, with made-up data and a small model, on
CPUs: what it trains over Weft is what it trains with its own dispatcher."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import automodel_modules as automodel
import pytest
import torch
from automodel_modules import WHOSE

from packages import HUGGING_FACE
from ranks import Ranks

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BUFFERS = {"deepep": "_buffer", "hybridep": "_hybrid_ep_buffer"}  # of fused_a2a, by dispatcher
STEPS = 3
SECONDS = 500.0  # that a call may take, which imports all of Automodel

if not os.environ.get("CONSUMERS"):
    pytest.skip("it takes minutes (make consumers runs it)", allow_module_level=True)
if not HUGGING_FACE.exists():
    pytest.skip(f"no {HUGGING_FACE} (scripts/python makes it)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("CPUs stand in for the GPUs that the recipe names", allow_module_level=True)


class Empty(ModuleType):
    """A package that the recipe imports and does not need: all its names are classes."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyPackages:
    NAMES = ("PIL", "datasets", "torchao", "torchdata", "wandb")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        if module.__name__ == "wandb":
            module.run = None
        elif module.__name__ == "torchdata.stateful_dataloader":
            module.StatefulDataLoader = torch.utils.data.DataLoader


_device = torch.device


class OnHost(type):
    """The class of a `torch.device` by which GPUs are the host."""

    def __call__(cls, kind="cpu", *more):
        return _device("cpu") if str(kind).startswith("cuda") else _device(kind, *more)

    def __instancecheck__(cls, one):
        return isinstance(one, _device)


def stand_in_for_gpus():
    if isinstance(torch.device, OnHost):
        return
    sys.path.append(str(HUGGING_FACE))
    sys.meta_path.insert(0, EmptyPackages())
    torch._dynamo.config.disable = True
    torch.device = OnHost("device", (), {})
    cuda = torch.cuda
    cuda.current_device = lambda: _device("cpu")
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0
    cuda.reset_peak_memory_stats = cuda.synchronize = lambda device=None: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *name: None


def settings(folder, num_ranks, dispatcher):
    components = "nemo_automodel.components"
    backend = {
        "_target_": f"{components}.models.common.BackendConfig",
        "attn": "sdpa",
        "linear": "torch",
        "rms_norm": "torch",
        "rope_fusion": False,
        "experts": "torch_mm",
        "dispatcher": dispatcher,
        # HybridEP's other routing is made by Triton, or of fp32 scores, which these are not.
        "dispatcher_hybridep_compact_routing": True,
    }
    config = {
        "_target_": "transformers.AutoConfig.from_pretrained",
        "pretrained_model_name_or_path": folder,
    }
    data = "datasets.llm.mock_iterable_dataset.MockIterableDataset"
    return {
        "seed": 1,
        "benchmark": {
            "warmup_steps": 1,
            "peak_tflops": 1,
            "nsys_start": -1,
            "nsys_end": -1,
            "nsys_ranks": [],
        },
        "step_scheduler": {
            "global_batch_size": 2 * num_ranks,
            "local_batch_size": 2,
            "num_epochs": 1,
            "max_steps": STEPS,
        },
        "distributed": {"strategy": "fsdp2", "ep_size": num_ranks},
        "dist_env": {"backend": "gloo"},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": config,
            "backend": backend,
            "torch_dtype": "float32",
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": folder},
        "loss_fn": {"_target_": f"{components}.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": f"{components}.{data}", "seq_len": 16, "num_samples": 1000},
        "dataloader": {
            "_target_": "torch.utils.data.DataLoader",
            "batch_size": None,
            "num_workers": 0,
        },
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    }


def trained(folder, num_ranks, dispatcher):
    """The loss of each step, and its gradients by the names of parameters."""
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes.llm.benchmark import BenchmarkingRecipeForNextTokenPrediction

    seen = []

    class Recipe(BenchmarkingRecipeForNextTokenPrediction):
        def _forward_backward_step(self, *given, loss_buffer, **options):
            super()._forward_backward_step(*given, loss_buffer=loss_buffer, **options)
            gradients = {}
            for name, parameter in self.model_parts[0].named_parameters():
                grad = parameter.grad
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                gradients[name] = whole.detach().float().clone()
            seen.append((loss_buffer[-1].item(), gradients))

    recipe = Recipe(ConfigNode(settings(folder, num_ranks, dispatcher)))
    recipe.setup()
    recipe.run_benchmark()
    return seen


def are_as_without(rank, num_ranks, group, folder, whose):
    stand_in_for_gpus()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    if rank == 0:
        from transformers import Qwen3MoeConfig

        config = Qwen3MoeConfig(**SIZES, architectures=["Qwen3MoeForCausalLM"])
        config.save_pretrained(folder)
    torch.distributed.barrier(group)
    with automodel.in_place(whose) as (fused_a2a, _):
        from nemo_automodel.components.moe import experts

        made = experts.TokenDispatcherConfig

        def without_triton(**options):
            return made(**{**options, "moe_permute_fusion": False})

        experts.TokenDispatcherConfig = without_triton
        wanted = trained(folder, num_ranks, "torch")
        for dispatcher, name in BUFFERS.items():
            assert getattr(fused_a2a, name) is None
            found = trained(folder, num_ranks, dispatcher)
            assert type(getattr(fused_a2a, name)).__module__.startswith("weft.")
            check_same(found, wanted)


def check_same(found, wanted):
    assert len(found) == len(wanted) == STEPS
    for (loss, gradients), (want, others) in zip(found, wanted):
        assert loss == pytest.approx(want, rel=1e-4)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            off = (gradient - others[name]).norm() / others[name].norm()
            assert off < 1e-3, f"{name}: {off}"


@pytest.mark.parametrize("whose", WHOSE)
def test_benchmark_recipe_trains_as_without(whose, tmp_path):
    """The recipe runs in processes of its own: other tests would find packages that are not there
    for them, and a torch that names no GPU."""
    pool = Ranks()
    try:
        pool(are_as_without, 2, str(tmp_path), whose, seconds=SECONDS)
    finally:
        pool.stop()
