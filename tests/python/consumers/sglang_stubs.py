# SPDX-License-Identifier: Apache-2.0
"""SGLang's dispatchers of DeepEP and NIXL EP and its single-batch overlap from its wheel, and
stand-ins for what they import and, where there is no GPU, for streams."""

import enum
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from loading import load, stub

import weft.compat
import weft.fp8

PACKAGE = "sglang 0.5.23"
NUM_MAX = 16  # tokens of a rank in a call with blocks of fixed size
_BELOW = "sglang.srt.layers.moe.token_dispatcher"
MODULES = [
    *(f"{_BELOW}.{name}" for name in ("base", "deepep", "deepep_v2", "nixl")),
    "sglang.srt.batch_overlap.single_batch_overlap",
]

# What a test chooses before it makes a dispatcher.
chosen = SimpleNamespace(
    output="BF16",
    is_prefill=True,
    expands_prefill=None,
    num_max=NUM_MAX,
    is_blackwell=False,
    runner="deep_gemm",
    buffers={},
    store=None,
)


class Setting(NamedTuple):
    """A variable of `sglang.srt.environ`."""

    value: object

    def get(self):
        return self.value() if callable(self.value) else self.value

    def is_set(self):
        return False


class DeepEPMode(enum.Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"

    def enable_normal(self):
        return self is not DeepEPMode.LOW_LATENCY

    def enable_low_latency(self):
        return self is not DeepEPMode.NORMAL

    def resolve(self, is_prefill):
        if self is not DeepEPMode.AUTO:
            return self
        return DeepEPMode.NORMAL if is_prefill else DeepEPMode.LOW_LATENCY


DispatcherOutputDtype = enum.Enum(
    "DispatcherOutputDtype", ["BF16", "FP8", "INT8", "NVFP4", "MXFP4", "MXFP8"]
)


class TopK(NamedTuple):
    """Output of a router, which a dispatcher takes."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None = None


class Recorder:
    """Takes every report of an expert distribution."""

    def __getattr__(self, name):
        return lambda *_, **__: None


class FixedRanks:
    """State of ranks that neither come nor go."""

    @staticmethod
    def instance():
        return None

    @staticmethod
    def get_ep_join_rank_offset():
        return 0


class HostEvent:
    """Shows what a CPU hides: that it is recorded before anybody waits for it, and when they do."""

    def __init__(self):
        self.is_recorded, self.awaited = False, threading.Event()

    def record(self):
        self.is_recorded = True


class HostStream:
    """The calling thread."""

    def wait_event(self, event):
        assert event.is_recorded
        event.awaited.set()

    def wait_stream(self, stream):
        pass


class Runner:
    """Result of `get_moe_runner_backend`."""

    @staticmethod
    def is_deep_gemm():
        return chosen.runner == "deep_gemm"

    @staticmethod
    def is_flashinfer_cutedsl():
        return chosen.runner == "flashinfer_cutedsl"


def _quantise(x, group_size, *, column_major_scales, scale_tma_aligned, scale_ue8m0):
    assert group_size == weft.fp8.GROUP
    assert not (column_major_scales or scale_tma_aligned or scale_ue8m0)
    return weft.fp8.to_fp8(x)


def _stubs() -> dict[str, ModuleType]:
    parallel = SimpleNamespace(
        attn_dp_size=1, attn_cp_size=1, tp_size=1, tp_group=None, max_ep_size=None
    )
    settings = SimpleNamespace(
        SGLANG_BLACKWELL_OVERLAP_SHARED_EXPERTS_OUTSIDE_SBO=Setting(False),
        SGLANG_DEEPEP_LL_COMBINE_SEND_NUM_SMS=Setting(None),
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=Setting(lambda: chosen.num_max),
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=Setting(lambda: chosen.expands_prefill),
        SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=Setting(NUM_MAX),
        SGLANG_DEEPEP_V2_NUM_SMS=Setting(0),
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=Setting(False),
        SGLANG_NIXL_EP_BF16_DISPATCH=Setting(lambda: chosen.output == "BF16"),
        SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=Setting(NUM_MAX),
    )
    scales = SimpleNamespace(ue8m0=False, tma_aligned=False)
    contents = {
        "sglang.kernels.ops.quantization.fp8_kernel": {
            "sglang_per_token_group_quant_fp8": _quantise
        },
        "sglang.srt.distributed.utils": {"get_global_tcp_store": lambda: chosen.store},
        "sglang.srt.elastic_ep.elastic_ep": {"ElasticEPStateManager": FixedRanks},
        "sglang.srt.environ": {"envs": settings},
        "sglang.srt.eplb.expert_distribution": {
            "get_global_expert_distribution_recorder": Recorder
        },
        "sglang.srt.layers.deep_gemm_wrapper": {
            "ENABLE_JIT_DEEPGEMM": True,
            "DEEPGEMM_BLACKWELL": False,
            "DEEPGEMM_SCALE_UE8M0": False,
        },
        "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: chosen.is_prefill},
        "sglang.srt.layers.moe": {"get_moe_runner_backend": Runner},
        "sglang.srt.layers.moe.topk": {"TopKOutput": TopK},
        "sglang.srt.layers.moe.utils": {
            "DeepEPMode": DeepEPMode,
            "DeepEPv2Fp8ScaleFormat": SimpleNamespace,
            "DispatcherOutputDtype": DispatcherOutputDtype,
            "get_deepep_config": lambda: None,
            "get_deepep_output_dtype": lambda _: DispatcherOutputDtype[chosen.output],
            "get_deepep_v2_fp8_scale_format": lambda: scales,
            "is_sbo_enabled": lambda: True,
            "is_tbo_enabled": lambda: False,
        },
        "sglang.srt.runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=SimpleNamespace(deepep_v2_mode="hybrid")),
            "get_parallel": lambda: parallel,
            "get_resources": lambda: chosen,
        },
        "sglang.srt.utils": {
            "get_bool_env_var": lambda _: False,
            "get_cuda_version": lambda: (12, 9),
            "is_blackwell": lambda: chosen.is_blackwell,
            "is_flashinfer_available": lambda: False,
            "is_hip": lambda: False,
            "is_npu": lambda: False,
            "load_json_config": None,
        },
    }
    return {name: stub(name, **given) for name, given in contents.items()}


STUBS = tuple(_stubs())


@contextmanager
def _streams():
    """Has torch.cuda give stand-ins for streams and events where there is no GPU."""
    gpu = SimpleNamespace(multi_processor_count=132)
    host = SimpleNamespace(current_stream=HostStream)
    stand_ins = {
        "get_device_properties": lambda device: gpu,
        "Event": HostEvent,
        "Stream": HostStream,
        "stream": lambda stream: nullcontext(),
    }
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(patch.multiple(torch.cuda, **stand_ins))
            stack.enter_context(patch.object(torch, "get_device_module", lambda: host))
        yield


@contextmanager
def dispatchers(wheel: Path, **choices: object):
    """The modules deepep, deepep_v2, nixl and single_batch_overlap, with these `chosen` and no
    buffer yet."""
    _, *modules = load(wheel, _stubs(), MODULES, ["deep_ep"])
    with patch.multiple(chosen, buffers={}, **choices), _streams():
        weft.compat.install("nixl_ep", force=True)  # it is imported when a dispatcher is made
        try:
            yield modules
        finally:
            weft.compat.uninstall("nixl_ep")


def make(dispatcher, layer, group, mode, **options):
    """One of SGLang's dispatchers for a layer of `dense`."""
    return dispatcher(
        group,
        layer.ids.size(1),
        num_experts=layer.num_experts,
        num_local_experts=layer.num_local,
        hidden_size=layer.x.size(1),
        params_dtype=torch.bfloat16,
        deepep_mode=mode,
        **options,
    )
