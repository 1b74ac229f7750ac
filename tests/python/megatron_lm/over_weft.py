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
