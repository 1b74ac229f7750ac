# SPDX-License-Identifier: Apache-2.0
"""What `dispatch` and `combine` of a `Buffer` accept."""

from __future__ import annotations

from typing import Any

import torch

from .checks import check
from .handle import Handle
from .hosts import Hosts
from .layout import Layout, check_experts
from .payload import Payload

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def experts_of(layout: Layout, num_ranks: int) -> int:
    """The number of experts, which only num_tokens_per_expert tells."""
    per_expert = layout.num_tokens_per_expert
    _check_given("num_tokens_per_expert", per_expert)
    check(
        per_expert.dim() == 1,
        f"dispatch: num_tokens_per_expert has shape {list(per_expert.shape)} (expected [E])",
    )
    check_experts("dispatch", per_expert.size(0), num_ranks)
    return per_expert.size(0)


def check_layout(layout: Layout, num_tokens: int, hosts: Hosts) -> None:
    """That of `get_dispatch_layout`, given back."""
    num_ranks = hosts.num_ranks
    experts = list(layout.num_tokens_per_expert.shape)
    for name, tensor, dtype, shape in (
        ("num_tokens_per_rank", layout.num_tokens_per_rank, torch.int32, [num_ranks]),
        ("num_tokens_per_expert", layout.num_tokens_per_expert, torch.int32, experts),
        ("is_token_in_rank", layout.is_token_in_rank, torch.bool, [num_tokens, num_ranks]),
    ):
        _check_given(name, tensor)
        _check_tensor("dispatch", name, tensor, dtype, shape)
    per_host = layout.num_tokens_per_rdma_rank
    if per_host is not None and hosts.are_several:
        name, shape = "num_tokens_per_rdma_rank", [hosts.num_hosts]
        _check_tensor("dispatch", name, per_host, torch.int32, shape)


def check_routing(
    topk_idx: Tensor | None, topk_weights: Tensor | None, num_tokens: int, num_worst_tokens: int
) -> None:
    """Top-k and weights come together, or not at all."""
    check(
        num_worst_tokens >= 0,
        f"dispatch: num_worst_tokens = {num_worst_tokens} (expected at least 0)",
    )
    check(
        (topk_idx is None) == (topk_weights is None),
        "dispatch: one of topk_idx and topk_weights is None (give both or neither)",
    )
    if topk_idx is None:
        check(
            num_worst_tokens == 0,
            f"dispatch: num_worst_tokens = {num_worst_tokens} without top-k (it needs topk_idx)",
        )
        return
    check(
        topk_idx.size(0) == num_tokens,
        f"dispatch: topk_idx has {topk_idx.size(0)} rows (expected {num_tokens}, those of x)",
    )
    _check_tensor("dispatch", "topk_weights", topk_weights, torch.float32, list(topk_idx.shape))


def check_handle(verb: str, handle: Any) -> None:
    check(
        isinstance(handle, Handle),
        f"{verb}: handle is a {type(handle).__name__} (expected what Buffer.dispatch returned)",
    )


def check_alignment(expert_alignment: int) -> None:
    check(
        expert_alignment >= 1,
        f"dispatch: expert_alignment = {expert_alignment} (expected at least 1)",
    )


def check_capacity(payload: Payload, num_worst_tokens: int, max_tokens: int) -> None:
    """That a call that nobody waits for has room for this rank's tokens."""
    check(
        num_worst_tokens == 0 or payload.device.type != "cuda" or payload.num_tokens <= max_tokens,
        f"dispatch: x has {payload.num_tokens} rows with num_worst_tokens = {num_worst_tokens} "
        f"(expected at most {max_tokens}: num_worst_tokens is less than the rows of a rank)",
    )


def check_repeats(
    payload: Payload, handle: Handle, topk_idx: Tensor | None, topk_weights: Tensor | None
) -> None:
    """That `payload` can go the way of the dispatch that made `handle`."""
    check(
        topk_idx is None and topk_weights is None,
        "dispatch: top-k is given beside a handle (which stands for it)",
    )
    plan = handle.plan
    check(
        payload.num_tokens == plan.num_tokens,
        f"dispatch: x has {payload.num_tokens} rows (expected {plan.num_tokens}, the handle's)",
    )
    check(
        payload.hidden == plan.exchange.hidden,
        f"dispatch: x has {payload.hidden} columns (expected {plan.exchange.hidden}, the handle's)",
    )


def check_rows(
    x: Tensor, handle: Handle, topk_weights: Tensor | None, biases: tuple[Tensor, ...]
) -> None:
    """What `combine` brings back."""
    plan = handle.plan
    hidden = plan.exchange.hidden
    check(x.dtype in _FLOATS, f"combine: x has dtype {x.dtype} (expected torch.bfloat16)")
    _check_tensor("combine", "x", x, x.dtype, [plan.num_rows, hidden])
    for bias in biases:
        _check_tensor("combine", "bias", bias, x.dtype, [plan.num_tokens, hidden])
    if topk_weights is not None:
        check(
            handle.has_topk,
            "combine: topk_weights are given (the dispatch of this handle had no top-k)",
        )
        shape = [plan.num_rows, plan.topk]
        _check_tensor("combine", "topk_weights", topk_weights, torch.float32, shape)


def biases_of(bias: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if bias is None:
        return ()
    if isinstance(bias, torch.Tensor):
        return (bias,)
    check(
        isinstance(bias, tuple) and len(bias) == 2,
        f"combine: bias is {type(bias).__name__} (expected None, a tensor or a tuple of two)",
    )
    return tuple(one for one in bias if one is not None)


def _check_given(name: str, tensor: Tensor | None) -> None:
    check(
        tensor is not None,
        f"dispatch: {name} is None (without a handle get_dispatch_layout's results are needed)",
    )


def _check_tensor(
    verb: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]
) -> None:
    check(
        tensor.dtype == dtype,
        f"{verb}: {name} has dtype {tensor.dtype} (expected {dtype})",
    )
    check(
        list(tensor.shape) == shape,
        f"{verb}: {name} has shape {list(tensor.shape)} (expected {shape})",
    )
