# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core with deep_ep of Weft, as the page docs/megatron.md says: before it is imported."""

import weft.compat
from ranks import after_call

weft.compat.install("deep_ep", force=True)
try:
    import megatron.core.transformer.moe.moe_layer
finally:
    weft.compat.uninstall()  # it has what it asked for
# A name that it lacks without Transformer Engine.
megatron.core.transformer.moe.moe_utils.te_general_gemm = None


def forget_buffer_after_call() -> None:
    """Megatron-Core keeps the buffer of the first process group that it meets."""
    from megatron.core.transformer.moe import fused_a2a

    after_call.append(fused_a2a.reset_hybrid_ep_buffer)


def initialize_groups(num_ranks: int) -> None:
    """Megatron-Core's groups, until the call of the rank ends: its process group may end then."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
        after_call.append(parallel_state.destroy_model_parallel)
