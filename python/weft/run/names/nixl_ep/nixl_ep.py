# SPDX-License-Identifier: Apache-2.0
"""Module that `import nixl_ep` finds below `weft run`: it gives its name to Weft's module."""

import weft.compat

weft.compat.install("nixl_ep", force=True)  # force: this very file has the name
