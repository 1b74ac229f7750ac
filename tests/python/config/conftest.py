# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.config import OverlapModelConfig, process

sys.path.insert(0, str(Path(__file__).parent))  # the tables beside the tests


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions that the rules see; None: Transformer Engine is absent."""

    def install(te="2.12.0", torch_version="2.6.0"):
        monkeypatch.setattr(process, "get_te_version", lambda: te)
        monkeypatch.setattr(process, "get_torch_version", lambda: torch_version)

    install()
    return install


@pytest.fixture
def model():
    """A model configuration that no rule refuses, with changes."""

    def make(**changes):
        return OverlapModelConfig(
            **{
                "overlap_moe_expert_parallel_comm": True,
                "expert_model_parallel_size": 2,
                "num_moe_experts": 8,
                "moe_token_dispatcher_type": "alltoall",
                "bf16": True,
                "gradient_accumulation_fusion": True,
                "add_bias_linear": False,
                **changes,
            }
        )

    return make


@pytest.fixture
def gpu(monkeypatch):
    """Sets the GPU that torch reports, or the error that it raises; None: there is no CUDA."""

    def insert(major=None, name="", error=None):
        def properties(index):
            if error is not None:
                raise error
            assert index == 0
            return SimpleNamespace(major=major, name=name)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    return insert
