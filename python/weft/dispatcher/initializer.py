# SPDX-License-Identifier: Apache-2.0
"""Preparation that NeMo Automodel runs before the first step of a pipeline, so that no stage waits
for what the one before it makes at its first dispatch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .base import size_of


class HybridEPPipelineRuntimeInitializer:
    """Has the buffer of HybridEP made for the tokens of a step (`prepare`)."""

    def __init__(self, manager: Any, hidden_dim: int, dtype: torch.dtype) -> None:
        """manager: a `_HybridEPManager`."""
        self.manager = manager
        self.hidden_dim = hidden_dim
        self.dtype = dtype

    @property
    def resource_key(self) -> tuple[type, str]:
        """Equal for initializers of which one is enough."""
        return HybridEPPipelineRuntimeInitializer, "process_global_buffer"

    @property
    def signature(self) -> tuple[Any, ...]:
        """The settings that what is made depends on."""
        manager = self.manager
        return (
            id(manager.group),
            self.hidden_dim,
            self.dtype,
            manager.num_local_experts,
            manager.num_experts,
            manager.router_topk,
            manager.moe_hybridep_num_sms,
            manager.moe_hybridep_compact_routing,
            manager.moe_hybridep_permute_fusion,
            manager.moe_hybridep_num_sms_preprocessing,
            manager.moe_hybridep_num_blocks_permute,
            manager.moe_hybridep_num_blocks_unpermute,
            manager.pad_multiple,
            _combine_chunk(),
        )

    @staticmethod
    def required_capacity(num_tokens: int) -> int:
        """Tokens that HybridEP makes room for: a multiple of 16 and of its chunk, 512 at least."""
        capacity = max(-(-num_tokens // 16) * 16, 512)
        chunk = max(_combine_chunk(), 1)
        return -(-capacity // chunk) * chunk

    def prepare(self, *, num_tokens: int, device: torch.device) -> None:
        """Collective. Runs the manager for the most tokens that a rank of the group will bring,
        unless that has been done for as many.

        Raises ValueError unless `num_tokens` is positive, RuntimeError if that was done for other
        settings, on all ranks if on one, and what the calls raise.
        """
        from weft import fused_a2a

        if num_tokens <= 0:
            raise ValueError(
                f"HybridEP runtime preparation requires a positive token capacity, got {num_tokens}"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        settings = (*self.signature, device)
        ready, problem = 0, None
        try:
            ready = fused_a2a.get_hybrid_ep_initialized_capacity(settings)
        except RuntimeError as error:
            problem = error
        told = (self.required_capacity(num_tokens), -ready, int(problem is not None))
        capacity, least_ready, is_refused = self._most_of_group(told, device)
        if is_refused:
            raise problem or RuntimeError("HybridEP runtime preparation: another rank refused it")
        if capacity <= -least_ready:
            return
        sizes = {"num_tokens": capacity, "hidden_dim": self.hidden_dim}
        self.manager.initialize_runtime(**sizes, dtype=self.dtype, device=device)
        fused_a2a.publish_hybrid_ep_initialized_capacity(settings, capacity)

    def _most_of_group(self, told: Sequence[int], device: torch.device) -> Sequence[int]:
        """The largest of each that a rank of the group tells."""
        if not dist.is_initialized() or size_of(self.manager.group) == 1:
            return told
        most = torch.tensor(told, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.manager.group)
        return most.tolist()


def _combine_chunk() -> int:
    from weft.compat import environment

    return environment.number("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", default=64, least=0)
