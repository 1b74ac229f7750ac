# SPDX-License-Identifier: Apache-2.0
"""What a communication plug-in sees of FlashInfer's `moe_ep`: its registry, and the classes that it
gets and gives."""

import contextlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

registry: dict[str, type] = {}


@dataclass(frozen=True)
class MoEEpCommParams:
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1


@dataclass(frozen=True)
class BootstrapConfig:
    world_size: int
    rank: int
    process_group: Any = None


@dataclass(frozen=True)
class MoEEpDispatchResult:
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_rank: int
    hidden_states_scale: torch.Tensor | None = None
    eplb_gathered_stats: torch.Tensor | None = None


class MoEEpCommunication:
    def __init__(self, bootstrap, params):
        assert self.is_platform_supported()
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
        self.num_local_experts = params.num_experts // self.ep_size


def register_communication(name):
    def decorate(cls):
        cls.backend_name = name
        registry[name] = cls
        return cls

    return decorate


def create_communication(bootstrap, params, backend, **options):
    name = getattr(backend, "backend_name", backend)
    if not isinstance(backend, str):
        options["config"] = backend
    return registry[name](bootstrap, params, **options)


@contextlib.contextmanager
def installed(name):
    """`import` finds these under that name."""
    parts = name.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    for each in names:
        module = ModuleType(each)
        module.__path__ = []
        sys.modules[each] = module
    for each in (MoEEpCommunication, MoEEpDispatchResult, register_communication):
        setattr(sys.modules[name], each.__name__, each)
    try:
        yield
    finally:
        for each in names:
            del sys.modules[each]
        registry.clear()
