# SPDX-License-Identifier: Apache-2.0
"""The interface of NIXL EP, on Weft: `Buffer`, which vLLM, SGLang and FlashInfer call.

`weft.compat.install("nixl_ep")` makes `import nixl_ep` mean this package.
"""

import torch

from weft.compat.deep_ep import Config, EventHandle, EventOverlap

from .buffer import Buffer

topk_idx_t = torch.int64

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
