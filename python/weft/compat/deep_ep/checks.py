# SPDX-License-Identifier: Apache-2.0
"""How the compatibility modules refuse a call."""

import contextlib
from collections.abc import Iterator
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


def check_is(what: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    """`tensor` has this dtype and shape; `what` is the call and the argument."""
    check(
        tensor.dtype == dtype and list(tensor.shape) == shape,
        f"{what} is {tensor.dtype} {list(tensor.shape)} (expected {dtype} {shape})",
    )


def check_tensor(what: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    """The same, and the message names only what is wrong."""
    check(tensor.dtype == dtype, f"{what} has dtype {tensor.dtype} (expected {dtype})")
    check(list(tensor.shape) == shape, f"{what} has shape {list(tensor.shape)} (expected {shape})")


def check_kind(what: str, given: Any, kind: type, expected: str) -> None:
    """`given`, a handle, was made by the call that `expected` names."""
    check(isinstance(given, kind), f"{what} is a {type(given).__name__} (expected {expected})")


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
