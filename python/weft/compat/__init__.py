# SPDX-License-Identifier: Apache-2.0
"""Weft under the names of other libraries, so that programs written for them run unchanged.

    import weft.compat
    weft.compat.install()      # now `import deep_ep` and `import uccl.ep` find Weft

`weft.compat.deep_ep` and `weft.compat.uccl` are the same without that.
"""

from .alias import install, uninstall

__all__ = ["install", "uninstall"]
