# SPDX-License-Identifier: Apache-2.0
"""The two functions that torch's pluggable allocator calls, called as torch does."""

import ctypes

import weft
from weft import _core


def segments(rank, num_ranks, group):
    library = ctypes.CDLL(_core.__file__)
    malloc, free = library.weft_pool_malloc, library.weft_pool_free
    malloc.restype = ctypes.c_void_p
    malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    assert malloc(1 << 20, 0, None) is None  # nobody gives
    exchange = weft.Exchange(group, hidden=32, num_experts=4)
    _core.give_segments(exchange.core)
    held = [malloc(bytes, 0, None) for bytes in (1, 1 << 20, 3 << 20)]
    assert len(set(held)) == 3 and None not in held
    assert exchange.footprint()["buffer_bytes"] >= 4 << 20
    ctypes.memset(held[1], 7, 1 << 20)
    assert malloc(0, 0, None) is None and malloc(1 << 60, 0, None) is None
    _core.give_segments(None)
    for data in held:
        free(data, 0, 0, None)
    free(held[0], 0, 0, None)  # torch never does; nothing happens
    assert exchange.footprint()["buffer_bytes"] == 0


def test_segments_come_from_the_exchange(ranks):
    ranks(segments, 2)
