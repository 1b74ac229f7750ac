# SPDX-License-Identifier: Apache-2.0
"""GPU outputs in memory that peers write straight into, under torch's own allocator."""

from __future__ import annotations

import torch
from torch.cuda.memory import (
    _cuda_beginAllocateCurrentThreadToPool,
    _cuda_endAllocateToPool,
    _cuda_releasePool,
)

from weft import _core


class OutputPool:
    """A torch.cuda.MemPool whose segments an exchange gives.

    torch keeps book of the streams that still use a tensor and hands memory out again in their
    order; the exchange recognises its own memory and has no need to stage rows.
    """

    def __init__(self, calls: _core.Exchange) -> None:
        self._calls = calls
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _core.__file__, "weft_pool_malloc", "weft_pool_free"
        )
        self._allocator = allocator  # as long as the pool
        self._pool = torch.cuda.MemPool(allocator.allocator())
        self._id = self._pool.id

    def empty(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[rows, cols], contents undefined, for the current stream.

        The memory is up to a sixteenth larger: numbers of rows that differ from call to call find
        what earlier calls left, where a new segment takes milliseconds and all ranks.
        """
        step = 1 << max(rows.bit_length() - 5, 0)
        roomy = -(-rows // step) * step
        _core.give_segments(self._calls)
        # As torch.cuda.use_mem_pool, whose context manager costs as much as the allocation.
        _cuda_beginAllocateCurrentThreadToPool(device.index, self._id)
        try:
            # torch.empty() takes longer to read its arguments.
            tensor = torch.empty_strided((roomy, cols), (cols, 1), dtype=dtype, device=device)
        finally:
            _cuda_endAllocateToPool(device.index, self._id)
            _cuda_releasePool(device.index, self._id)
            _core.give_segments(None)
        # Not a view: it may be changed in place.
        return tensor if roomy == rows else tensor.resize_(rows, cols)
