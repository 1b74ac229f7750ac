# SPDX-License-Identifier: Apache-2.0
"""The interface of MoonEP, on Weft. `weft.compat.install("moonep")` makes `import moonep` mean this
module."""

from .buffer import Buffer, BufferPlan

__all__ = ["Buffer", "BufferPlan"]
