# SPDX-License-Identifier: Apache-2.0
from ranks import ranks  # noqa: F401  (a fixture)
