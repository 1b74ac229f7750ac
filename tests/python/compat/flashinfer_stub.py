# SPDX-License-Identifier: Apache-2.0
"""The part of FlashInfer's `moe_ep` that plug-ins see: its registries, and the classes that they
get and give."""

import contextlib
import enum
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
    tcp_store: Any = None


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


EpAlgorithm = enum.Enum("EpAlgorithm", ["LOW_LATENCY", "HIGH_THROUGHPUT"])
EpLayout = enum.Enum("EpLayout", ["EXPERT_MAJOR", "RANK_MAJOR"])
QuantType = enum.Enum("QuantType", ["FP8E4M3", "UE8M0"])
fleets: dict[str, type] = {}


@dataclass(frozen=True)
class FleetParams:
    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int
    algorithm: EpAlgorithm = EpAlgorithm.LOW_LATENCY
    layout: EpLayout = EpLayout.EXPERT_MAJOR


@dataclass(frozen=True)
class FleetAlgoKnobQuantization:
    quants: frozenset[QuantType]


@dataclass(frozen=True)
class FleetAlgoKnobTopologyCapacity:
    n: int


@dataclass(frozen=True)
class FleetAlgoKnobFaultTolerance:
    enabled: bool = True
    timeout_ms: int = 0


@dataclass(frozen=True)
class HandleAlgoKnobSplitOperation:
    pass


@dataclass(frozen=True)
class HandleAlgoKnobTopKWeights:
    weights: torch.Tensor


@dataclass(frozen=True)
class HandleAlgoKnobNumReceivedTokens:
    target: torch.Tensor


@dataclass(frozen=True)
class HandleParams:
    topk_ids: torch.Tensor


@dataclass(frozen=True)
class DispatchInputParams:
    x: Any


@dataclass(frozen=True)
class DispatchOutput:
    expert_tensors: torch.Tensor
    num_tokens: int
    recv_topk_idx: torch.Tensor | None = None
    recv_topk_weights: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None
    recv_total_counter: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class CombineInputParams:
    x: Any
    out: torch.Tensor | None = None


@dataclass(frozen=True)
class CombineOutput:
    x: torch.Tensor


class Handle:
    pass


class Fleet:
    def _no_fault_tolerance(self, name):
        raise NotImplementedError(f"{name} without the knob")


def register_fleet(name):
    def decorate(cls):
        fleets[name] = cls
        return cls

    return decorate


def create_fleet(bootstrap, params, algo_knobs=(), backend="nccl_ep"):
    return fleets[getattr(backend, "backend_name", backend)](bootstrap, params, algo_knobs)


def kind_for_layer(backend):
    """Returns the kind that a layer takes a back end for; refuses one that is both or neither."""
    kinds = [
        kind for kind, known in (("fleet", fleets), ("communication", registry)) if backend in known
    ]
    assert len(kinds) == 1, f"{backend} is {kinds}"
    return kinds[0]


_COMMUNICATION = (MoEEpCommunication, MoEEpDispatchResult, register_communication)
_FLEET = (Fleet, Handle, DispatchOutput, CombineOutput, register_fleet)


@contextlib.contextmanager
def installed(name):
    """`import` finds these under that name."""
    parts = name.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    for each in names:
        module = ModuleType(each)
        module.__path__ = []
        sys.modules[each] = module
    for each in _COMMUNICATION if "communication" in name else (*_COMMUNICATION, *_FLEET):
        setattr(sys.modules[name], each.__name__, each)
    try:
        yield
    finally:
        for each in names:
            del sys.modules[each]
        registry.clear()
        fleets.clear()
