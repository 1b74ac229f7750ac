# SPDX-License-Identifier: Apache-2.0
"""Module that `import uccl` finds below `weft run`: it gives its name to Weft's module."""

import weft.compat

weft.compat.install("uccl", force=True)  # force: this very file has the name
