# SPDX-License-Identifier: Apache-2.0
"""UCCL's configurations by number of ranks: those of an older `deep_ep`."""

from __future__ import annotations

from weft.compat.deep_ep import config

_UNLISTED = (48, 96)


def _older(table: dict[int, config.Chunks], other: dict[int, config.Chunks]):
    return {size: chunks for size, chunks in (table | other).items() if size not in _UNLISTED}


DISPATCH = _older(
    config.DISPATCH,
    {
        24: (8, 288, 32, 128),
        32: (32, 288, 32, 128),
        64: (20, 288, 28, 128),
        128: (20, 560, 32, 128),
    },
)
COMBINE = _older(config.COMBINE, {64: (1, 288, 20, 128), 128: (1, 560, 12, 128)})
