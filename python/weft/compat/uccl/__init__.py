# SPDX-License-Identifier: Apache-2.0
"""The interface of UCCL-EP, on Weft.

`weft.compat.install()` makes `import uccl` mean this package. What UCCL does otherwise than it
promises is done right here: an event is one on torch's current stream, a cached dispatch honours
`previous_event`, rebuilding a buffer does not abort.
"""

from weft.compat.deep_ep import EventOverlap

from .buffer import Buffer, EventHandle, UCCLBuffer

__all__ = ["Buffer", "EventHandle", "EventOverlap", "UCCLBuffer"]
