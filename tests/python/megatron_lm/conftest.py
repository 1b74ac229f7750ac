# SPDX-License-Identifier: Apache-2.0
import pytest

from ranks import Ranks


@pytest.fixture(scope="module")
def newer_ranks():
    """Processes that have no other Megatron-Core yet."""
    pool = Ranks()
    yield pool
    pool.stop()
