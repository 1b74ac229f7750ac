# SPDX-License-Identifier: Apache-2.0
"""How the compatibility modules refuse a call."""

import functools
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.errors import BadCall, Unsupported
from weft.outputs import NUMBERS

MAX_TOPK = _core.MAX_TOPK  # most routes of a token
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # rows that combine can sum
INTEGERS = (torch.int64, torch.int32)

# Checks of every call, in the core, with the messages of `check_tensor`.
check_routing = _core.check_routing
check_experts = _core.check_experts
check_layout = _core.check_layout

Dtypes = torch.dtype | tuple[torch.dtype, ...] | None


class NotInWeft(Unsupported, NotImplementedError):
    """A request that another library can serve and Weft cannot."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unsupported")


def check(is_good: object, problem: str) -> None:
    """Raises `BadCall` with `problem` unless `is_good`."""
    if not is_good:
        raise BadCall(problem)


def check_least(what: str, value: int, least: int = 1) -> None:
    if value < least:
        raise BadCall(f"{what} = {value} (expected at least {least})")


@functools.cache
def _bits(dtypes: Dtypes) -> int:
    """Returns a bit per dtype that the core knows, at torch's number."""
    if dtypes is None:
        return (1 << 64) - 1
    each = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    return sum(1 << NUMBERS[dtype] for dtype in each if dtype in NUMBERS)


def check_tensor(what: str, tensor: Any, dtypes: Dtypes, shape: Sequence[int | str]) -> None:
    """Raises BadCall unless `tensor` has one of the dtypes (None: any) and the shape, in which a
    name stands for any size; `what` names the argument."""
    if _core.suits(tensor, _bits(dtypes), shape):
        return  # the slow rest finds the message
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if not isinstance(tensor, Tensor):
        problem = "is None" if tensor is None else f"is a {type(tensor).__name__}"
    elif dtypes and tensor.dtype not in dtypes:
        problem = f"has dtype {tensor.dtype}"
    elif tensor.dim() != len(shape) or any(
        size != found and not isinstance(size, str) for size, found in zip(shape, tensor.shape)
    ):
        problem = f"has shape {list(tensor.shape)}"
    elif not (tensor.is_cpu or tensor.is_cuda):
        problem = f"is on {tensor.device}, neither a CPU nor a CUDA device"
    else:
        return
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes or ("a tensor",))
    raise BadCall(f"{what} {problem} (expected {names} [{', '.join(map(str, shape))}])")


def check_optional(what: str, tensor: Any, *wanted: Any) -> None:
    """Checks like `check_tensor`, unless the tensor is None."""
    if tensor is not None:
        check_tensor(what, tensor, *wanted)


def check_handle(handle: Any, kind: type) -> Any:
    """Returns the handle, else BadCall names `kind.maker`, the call that makes it."""
    if not isinstance(handle, kind):
        raise BadCall(f"handle is a {type(handle).__name__} (expected {kind.maker})")
    return handle


def check_even(num_sms: int) -> None:
    if num_sms < 0 or num_sms % 2 != 0:
        raise BadCall(f"num_sms = {num_sms} (The SM count must be even)")


def count_of(name: str, value: Any) -> int:
    """Returns `value` (an int, or anything with __index__: a 0-d tensor) as an int >= 0."""
    try:
        count = operator.index(value)
    except TypeError:
        raise BadCall(f"{name} = {value!r} (expected an integer)") from None
    check_least(name, count, 0)
    return count


def warn_deprecated(verb: str, name: str, what: str = "ignored") -> None:
    warnings.warn(f"{verb}: {name} is deprecated and {what}", DeprecationWarning, stacklevel=3)
