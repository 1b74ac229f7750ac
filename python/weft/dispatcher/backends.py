# SPDX-License-Identifier: Apache-2.0
"""Chooses the functions of `weft.fused_a2a` that move the tokens of a flex backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.fused_a2a.expert_rows import ByExpert


class Backend(NamedTuple):
    dispatch: Callable[..., Any] | None
    combine: Callable[..., Any] | None
    set_num_sms: Callable[[int], None] | None
    by_expert: ByExpert | None = None  # the same and the permutes around it in one step


def backend(name: str) -> Backend:
    """The functions of "deepep", "uccl_ep" or "hybridep"."""
    # Looked up at each call, so that a replaced function counts.
    from weft import fused_a2a
    from weft.fused_a2a import expert_rows

    if name == "deepep":
        return Backend(
            fused_a2a.fused_dispatch,
            fused_a2a.fused_combine,
            fused_a2a.set_deepep_num_sms,
            _on_own_buffers(expert_rows.DEEPEP_BY_EXPERT, fused_a2a.Buffer),
        )
    if name == "uccl_ep":
        return Backend(
            fused_a2a.uccl_fused_dispatch,
            fused_a2a.uccl_fused_combine,
            fused_a2a.set_uccl_num_sms,
            _on_own_buffers(expert_rows.UCCL_BY_EXPERT, fused_a2a.UCCLBuffer),
        )
    return Backend(fused_a2a.hybrid_ep_dispatch, fused_a2a.hybrid_ep_combine, None)


def _on_own_buffers(by_expert: ByExpert, kind: type) -> ByExpert | None:
    """None if the module was given buffers of another class, which have no exchange of Weft."""
    from weft.compat.deep_ep import Buffer

    return by_expert if isinstance(kind, type) and issubclass(kind, Buffer) else None
