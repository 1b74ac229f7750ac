# SPDX-License-Identifier: Apache-2.0
"""The version of this package. A compiled module of another version is refused on import."""

from weft import _core
from weft._build_version import VERSION as __version__  # written by the build

_core_version = getattr(_core, "__version__", "without a version")
if _core_version != __version__:
    raise ImportError(
        f"weft: the package is {__version__}, but its compiled module {_core.__file__} is "
        f"{_core_version}. Remove that file and install Weft again"
    )
