# SPDX-License-Identifier: Apache-2.0
"""Arguments after num_experts of a low-latency dispatch, in the orders that callers give them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_V1_ORDER = (  # of what may follow num_experts by position
    "cumulative_local_expert_recv_stats",
    "dispatch_wait_recv_cost_stats",
    "use_fp8",
    "round_scale",
    "use_ue8m0",
    "async_finish",
    "return_recv_hook",
)
_HYBRID_ORDER = (
    "topk_weights",
    "cumulative_local_expert_recv_stats",
    "dispatch_wait_recv_cost_stats",
    "x_global_scale",
    "use_fp8",
    "round_scale",
    "use_ue8m0",
    "use_nvfp4",
    "use_ue8m0_for_sf",
    "async_finish",
    "return_recv_hook",
)


def in_any_order(dispatch: Callable[..., tuple]) -> Callable[..., tuple]:
    """Returns a `dispatch` whose arguments after num_experts may be in its own order, which is
    sgl-deep-ep's, in V1's or in that of the hybrid-ep branch."""
    parameters = inspect.signature(dispatch).parameters.values()
    places = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    sgl_order = tuple(places[places.index("num_experts") + 1 :])

    @functools.wraps(dispatch)
    def call(
        self: Any,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *more: Any,
        **options: Any,
    ) -> tuple:
        if not more:
            num_max = num_max_dispatch_tokens_per_rank
            return dispatch(self, x, topk_idx, num_max, num_experts, **options)
        given = (self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts)
        order = _order_of(more, sgl_order)
        beyond = more[len(order) :]  # Python refuses these
        return dispatch(*given, *beyond, **dict(zip(order, more)), **options)

    return call


def _order_of(given: tuple[Any, ...], sgl_order: tuple[str, ...]) -> tuple[str, ...]:
    """Finds the order: use_fp8 is third in V1's, fourth in sgl-deep-ep's and fifth in hybrid-ep's.
    Before it come tensors or None: int32, then int64; in hybrid-ep's two-dimensional weights come
    first."""
    first, second, third, fourth = (*given, *(False,) * 4)[:4]
    if (
        getattr(first, "ndim", 1) == 2
        or getattr(second, "dtype", None) == torch.int32
        or getattr(third, "dtype", None) == torch.int64
        or not isinstance(fourth, bool | int)
    ):
        return _HYBRID_ORDER
    return _V1_ORDER if isinstance(third, bool | int) else sgl_order
