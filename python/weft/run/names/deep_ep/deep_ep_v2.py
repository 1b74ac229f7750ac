# SPDX-License-Identifier: Apache-2.0
"""Module that `import deep_ep_v2` finds below `weft run --as deep_ep`: DeepEP by the name under
which prime-rl builds its second version."""

import sys

import weft.compat.deep_ep

sys.modules[__name__] = weft.compat.deep_ep
