# SPDX-License-Identifier: Apache-2.0
"""How the compatibility modules refuse a call."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import Exchange, Plan
from weft.errors import BadCall, Error

MAX_TOPK = 32  # most routes of a token
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # rows that combine can sum


def check(is_good: object, problem: str) -> None:
    """Raises `BadCall` with `problem` unless `is_good`."""
    if not is_good:
        raise BadCall(problem)


def check_least(what: str, value: int, least: int = 1) -> None:
    check(value >= least, f"{what} = {value} (expected at least {least})")


def check_tensor(
    what: str, tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """`tensor`, if it is given, has this dtype and shape; `what` is the call and the argument."""
    if tensor is not None:
        shapes = [list(tensor.shape), list(shape)]
        check(tensor.dtype == dtype, f"{what} has dtype {tensor.dtype} (expected {dtype})")
        check(shapes[0] == shapes[1], f"{what} has shape {shapes[0]} (expected {shapes[1]})")


def check_handle(verb: str, handle: Any, kind: type) -> None:
    """`handle` is of this kind, whose attribute `maker` says what makes it."""
    name = type(handle).__name__
    check(isinstance(handle, kind), f"{verb}: handle is a {name} (expected {kind.maker})")


def check_topk(verb: str, topk_idx: Tensor) -> None:
    """topk_idx holds integers [T, K] with K from 1 to 32."""
    check(
        topk_idx.dtype in (torch.int64, torch.int32),
        f"{verb}: topk_idx has dtype {topk_idx.dtype} (expected torch.int64)",
    )
    check(
        topk_idx.dim() == 2 and 1 <= topk_idx.size(1) <= MAX_TOPK,
        f"{verb}: topk_idx has shape {list(topk_idx.shape)} (expected [T, K <= {MAX_TOPK}])",
    )


def check_routing(
    verb: str, topk_idx: Tensor, topk_weights: Tensor | None, num_tokens: int
) -> None:
    """topk_idx has a row for each token, and the weights, if they are given, have its shape."""
    check(
        topk_idx.size(0) == num_tokens,
        f"{verb}: topk_idx has {topk_idx.size(0)} rows (expected {num_tokens}, those of x)",
    )
    check_tensor(f"{verb}: topk_weights", topk_weights, torch.float32, topk_idx.shape)


def check_integers(verb: str, topk_idx: Tensor) -> None:
    check(
        topk_idx.dtype in (torch.int64, torch.int32) and topk_idx.dim() == 2,
        f"{verb}: topk_idx is {topk_idx.dtype} {list(topk_idx.shape)} "
        "(expected int64 or int32 [tokens, k])",
    )


def check_experts(verb: str, num_experts: int, num_ranks: int) -> None:
    check(
        num_experts > 0 and num_experts % num_ranks == 0,
        f"{verb}: num_experts = {num_experts} (expected a positive multiple of {num_ranks} ranks)",
    )


def check_even(verb: str, num_sms: int) -> None:
    check(
        num_sms >= 0 and num_sms % 2 == 0,
        f"{verb}: num_sms = {num_sms} (The SM count must be even)",
    )


@contextlib.contextmanager
def refused_by_all(
    exchange: Exchange, verb: str = "plan_and_dispatch", plan: Plan | None = None, **options: Any
) -> Iterator[None]:
    """Makes the other ranks raise too, and not wait, if a check within fails on this rank only.

    verb, plan and options: the call that the other ranks make now, as for `Exchange.refuse`.
    """
    try:
        yield
    except BadCall as problem:
        try:
            exchange.refuse(verb, str(problem), plan, **options)
        except Error as error:  # inside a capture: it says so
            raise BadCall(str(error)) from problem
        raise
