# SPDX-License-Identifier: Apache-2.0
"""`BufferAllocator`: tensors whose places in a buffer are settled before the buffer exists."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check, check_tensor
from ..elastic.model import ALIGNMENT
from ..payload import round_up


class BufferAllocator:
    """Hands out tensors of the device "meta", each at the next multiple of 2 MiB of the storage for
    `materialize`. num_bytes: of the storage, so far."""

    def __init__(self) -> None:
        self.alignment: int = ALIGNMENT
        self.allocations: list[tuple[Tensor, int]] = []  # and where it begins
        self.num_bytes: int = 0
        self.materialized: bool = False

    def allocate(self, shape: Sequence[int] | int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor without memory. AssertionError after `materialize`."""
        check(not self.materialized, "allocate: the allocator has been materialized already")
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        size = math.prod(tensor.shape) * tensor.element_size()
        self.num_bytes += round_up(size, self.alignment)
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Makes all tensors that were handed out views of storage, contiguous uint8 [num_bytes].
        AssertionError for another storage, and the second time."""
        check(not self.materialized, "materialize: the allocator has been materialized already")
        check_tensor("storage", storage, torch.uint8, [self.num_bytes])
        check(storage.is_contiguous(), "storage is not contiguous")
        for tensor, begin in self.allocations:
            size = math.prod(tensor.shape) * tensor.element_size()
            real = storage[begin : begin + size].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, real)
        self.materialized = True
