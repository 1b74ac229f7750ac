# SPDX-License-Identifier: Apache-2.0
"""bf16 rows as FP8 with one scaling factor for every 128 elements."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from weft import _core

GROUP = _core.QUANTISE_GROUP  # elements that share a factor
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # by the name of `quantise`
_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_AMAX = 1e-4  # keeps the factor of an all-zero group away from zero
_MANTISSA_BITS = 23


_Given, _Made = ParamSpec("_Given"), TypeVar("_Made")


def with_standard_floats(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Wraps `function` so that its bits do not depend on the thread's rounding mode or flushing of
    subnormal numbers. (Torch's other threads are as they were made.)"""

    @functools.wraps(function)
    def call(*args: _Given.args, **options: _Given.kwargs) -> _Made:
        if torch.compiler.is_compiling():
            return function(*args, **options)
        return _core.with_standard_floats(function, *args, **options)

    return call


@with_standard_floats
def to_fp8(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Turns x [T, H] into float8_e4m3fn [T, H] and float32 [T, H / 128], about x as a product, with
    the bits of dispatch with `scale_rule="clamped"`, or with round_scale "power_of_two".

    The factor is max(largest magnitude, 1e-4) / 448; round_scale rounds it up to a power of two.
    """
    groups = x.float().unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(2).clamp(min=_SMALLEST_AMAX)
    # Both operands of a quotient are tensors: torch takes a number's reciprocal, on some devices.
    largest = amax.new_full((), _LARGEST)
    scales = amax * (torch.ones_like(largest) / largest)
    factors = largest / amax
    if round_scale:
        # These numbers are positive and normal: any mantissa bit carries into the exponent.
        mantissa = (1 << _MANTISSA_BITS) - 1
        scales = ((scales.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
        factors = scales.reciprocal()
    rows = (groups * factors.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return rows, scales


def from_ue8m0(exponents: Tensor) -> Tensor:
    """Returns powers of two, float32 [T, S], of exponents, four bytes in an int32 [T, S / 4]."""
    each = exponents.contiguous().view(torch.uint8).to(torch.int32)
    return (each << _MANTISSA_BITS).view(torch.float32)
