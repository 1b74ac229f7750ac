# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes over DeepEP and NIXL EP from its wheel, and stand-ins for what they import."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from loading import in_place, load, stub

import weft.compat

PACKAGE = "vllm 0.33.0"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_PREPARE = f"{_FUSED_MOE}.prepare_finalize"
MODULES = [f"{_PREPARE}.{name}" for name in ("deepep_ht", "deepep_ll", "deepep_v2", "nixl_ep")]


class Metadata:
    """How many rows experts have."""

    def __init__(
        self,
        expert_num_tokens,
        expert_num_tokens_cpu,
        psum_recv_per_rank=None,
        rank_expert_offset=None,
    ):
        self.expert_num_tokens = expert_num_tokens
        self.expert_num_tokens_cpu = expert_num_tokens_cpu
        self.psum_recv_per_rank = psum_recv_per_rank
        self.rank_expert_offset = rank_expert_offset

    @staticmethod
    def make_from_list(counts, device):
        on_cpu = torch.tensor(counts, dtype=torch.int32)
        return Metadata(on_cpu.to(device), on_cpu)


class Delegate:
    """Leaves the weights to whoever combines."""


class Contiguous:
    """Weights rows [N, K, H] and adds up those of a token."""

    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        assert output is None and not apply_router_weight_on_input
        rows = fused_expert_output.view(*topk_ids.shape, -1).float()
        return (rows * topk_weights.unsqueeze(2)).sum(1).to(fused_expert_output.dtype)


def _unquantised(x, scale, quant_dtype=None, *_, **__):
    assert quant_dtype is None
    return x, None


class Kernel:
    """A stand-in for a Triton kernel: calls `run` with its tensors."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return self.run


def _globalise(ids, psum, num_ranks, offset, num_experts, count, *, topk, BLOCK):
    """Does what vLLM's kernel does: local experts become global ones, unused rows and others -1."""
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    is_used = (ids >= 0) & (ids + offset < num_experts) & (rows < psum[num_ranks - 1])
    ids.copy_(torch.where(is_used, ids + offset, -1))


def _triton() -> dict[str, object]:
    """The real one where there are a GPU and Triton: vLLM's kernel then runs as it is."""
    if torch.cuda.is_available() and find_spec("triton"):
        import triton
        import triton.language

        return {"tl": triton.language, "triton": triton}
    jit = Kernel(_globalise)
    return {
        "tl": SimpleNamespace(constexpr=int),
        "triton": SimpleNamespace(jit=lambda _: jit, cdiv=lambda a, b: -(-a // b)),
    }


def _nothing(*_, **__):
    return None


QUANT_CONFIG = SimpleNamespace(
    is_block_quantized=False,
    quant_dtype=None,
    a1_scale=None,
    a1_gscale=None,
    a2_scale=None,
    block_shape=None,
    per_act_token_quant=False,
    is_scale_swizzled=False,
)


def _stubs() -> dict[str, ModuleType]:
    logger = SimpleNamespace(debug_once=_nothing, info_once=_nothing, warning_once=_nothing)
    activations = SimpleNamespace(Standard="standard", BatchedExperts="batched")
    switches = (
        "switch_to_comm switch_to_compute switch_to_compute_sync "
        "yield_and_switch_from_comm_to_compute yield_and_switch_from_compute_to_comm "
        "maybe_run_recv_hook"
    )
    contents = {
        "vllm.envs": {"VLLM_DEEPEPLL_NVFP4_DISPATCH": False},
        "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(dp_metadata=None)},
        "vllm.logger": {"init_logger": lambda _: logger},
        f"{_FUSED_MOE}.config": {"FusedMoEQuantConfig": SimpleNamespace},
        f"{_FUSED_MOE}.modular_kernel": {
            "ExpertTokensMetadata": Metadata,
            "FusedMoEActivationFormat": activations,
            "FusedMoEExperts": object,
            "FusedMoEPrepareAndFinalizeModular": object,
            "PrepareResultType": tuple,
            "ReceiverType": object,
            "TopKWeightAndReduce": object,
        },
        f"{_FUSED_MOE}.topk_weight_and_reduce": {
            "TopKWeightAndReduceContiguous": Contiguous,
            "TopKWeightAndReduceDelegate": Delegate,
        },
        f"{_FUSED_MOE}.utils": {
            "moe_kernel_quantize_input": _unquantised,
            "normalize_batched_scales_shape": None,
        },
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils": {
            "MXFP8_BLOCK_SIZE": 32,
            "swizzle_mxfp8_scale": None,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
        "vllm.triton_utils": _triton(),
        "vllm.utils.math_utils": {
            "cdiv": lambda a, b: -(-a // b),
            "round_up": lambda a, b: -(-a // b) * b,
        },
        "vllm.utils.torch_utils": {"current_stream": _nothing},
        "vllm.v1.worker.ubatching": {
            "dbo_current_ubatch_id": lambda: 0,
            "dbo_enabled": lambda: False,
            "dbo_get_previous_event": _nothing,
            **{f"dbo_{name}": _nothing for name in switches.split()},
        },
    }
    return {name: stub(name, **given) for name, given in contents.items()}


STUBS = tuple(_stubs())


def _manager_stubs() -> dict[str, ModuleType]:
    parallel = SimpleNamespace(
        enable_elastic_ep=True, elastic_ep_max_dp_size=1, data_parallel_size=1
    )
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    groups = ("get_dp_group", "get_ep_group", "get_pcp_group", "get_tp_group")
    given = {name: lambda: group for name in groups}
    has = ("has_flashinfer_nvlink_one_sided", "has_flashinfer_nvlink_two_sided")
    imports = "check_moonep_system_support deep_ep_v2_unavailable_reason has_deep_ep has_deep_ep_v2"
    contents = {
        "vllm.config": {
            "get_current_vllm_config": lambda: SimpleNamespace(parallel_config=parallel)
        },
        "vllm.distributed": given,
        "vllm.distributed.parallel_state": {
            **given,
            "in_the_same_node_as": lambda *_, **__: [True],
        },
        "vllm.distributed.utils": {"StatelessProcessGroup": SimpleNamespace},
        "vllm.utils.flashinfer": dict.fromkeys(has, _nothing),
        "vllm.utils.import_utils": dict.fromkeys([*imports.split(), "has_mori"], _nothing),
    }
    return {name: stub(name, **given) for name, given in contents.items()}


MANAGER_STUBS = tuple(_manager_stubs())


def modules(wheel: Path) -> list[ModuleType]:
    """deepep_ht, deepep_ll, deepep_v2 and nixl_ep."""
    return load(wheel, _stubs(), MODULES, ["deep_ep", "nixl_ep"])


@contextmanager
def managers(wheel: Path) -> Iterator[ModuleType]:
    """all2all, with the managers of buffers; its `get_current_vllm_config` can be written to."""
    name = "vllm.distributed.device_communicators"
    modules = [f"{name}.base_device_communicator", f"{name}.all2all"]
    stubs = {**_stubs(), **_manager_stubs()}
    module = load(wheel, stubs, modules, ["nixl_ep"])[-1]
    weft.compat.install("nixl_ep", force=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(in_place(stubs))
            if not torch.cuda.is_available():
                stack.enter_context(patch.object(torch.accelerator, "synchronize"))
            yield module
    finally:
        weft.compat.uninstall("nixl_ep")
