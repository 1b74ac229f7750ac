# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # dense, loading and the stubs
sys.path.insert(1, str(Path(__file__).parents[1] / "compat"))  # nixl_cases

SIZES = [1, 2] if torch.cuda.is_available() else [2]


@pytest.fixture(scope="module", params=SIZES, ids="{}_ranks".format)
def num_ranks(request):
    """Two on CPUs; on GPUs also one alone, as two may have to share one."""
    return request.param
