# SPDX-License-Identifier: Apache-2.0
"""Tensors as the C++ side takes them, and new ones for what it gives.

Every call makes some, so they go the ways of torch that take the fewest microseconds.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import to_dlpack

Tensor = torch.Tensor


def view(tensor: Tensor | None):
    """A contiguous view without gradient, as a DLPack capsule; one-byte floats as bytes."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.element_size() == 1 and tensor.dtype not in (torch.uint8, torch.bool):
        tensor = tensor.view(torch.uint8)
    return to_dlpack(tensor)


def empty_like(tensor: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """[rows, cols] where `tensor` is; torch reads strides sooner than it sees there are none."""
    return tensor.new_empty_strided((rows, cols), (cols, 1), dtype=dtype)


def as_bytes(tensor: Tensor | None) -> Tensor | None:
    """[rows, bytes] uint8: payload that nobody computes with."""
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1).contiguous()  # [T, 1] of any stride counts as contiguous
    cols = tensor.size(1) * tensor.element_size()
    return flat.view(torch.uint8).reshape(tensor.size(0), cols)
