# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls of a `Buffer`: there is a block of fixed size for each expert."""

from .calls import LowLatencyMode as LowLatencyMode
from .rows import LowLatencyHandle as LowLatencyHandle
from .rows import RankMask as RankMask
