# SPDX-License-Identifier: Apache-2.0
"""Which functions of `weft.fused_a2a` carry the tokens of a flex backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Backend(NamedTuple):
    dispatch: Callable[..., Any] | None
    combine: Callable[..., Any] | None
    set_num_sms: Callable[[int], None] | None


def backend(name: str) -> Backend:
    """The functions of "deepep", "uccl_ep" or "hybridep"."""
    from weft import fused_a2a  # looked up at each call, so that a replaced function counts

    if name == "deepep":
        return Backend(
            fused_a2a.fused_dispatch, fused_a2a.fused_combine, fused_a2a.set_deepep_num_sms
        )
    if name == "uccl_ep":
        return Backend(
            fused_a2a.uccl_fused_dispatch,
            fused_a2a.uccl_fused_combine,
            fused_a2a.set_uccl_num_sms,
        )
    return Backend(fused_a2a.hybrid_ep_dispatch, fused_a2a.hybrid_ep_combine, None)
