# SPDX-License-Identifier: Apache-2.0
"""Backends that each GPU gets, with the GPU replaced."""

from types import SimpleNamespace

import pytest

from weft.config import apply_flex_dispatcher_backend, validate_flex_dispatcher_backend
from weft.config import process as module

# name, major, DeepEP, HybridEP, NCCL EP
GPUS = [
    ("Tesla V100-SXM2-32GB", 7, False, False, False),
    ("NVIDIA A100-SXM4-80GB", 8, True, True, False),
    ("NVIDIA H100 80GB HBM3", 9, True, True, True),
    ("NVIDIA B200", 10, True, True, True),
    ("NVIDIA B300 SXM6 AC", 10, True, True, True),
    ("NVIDIA GB200", 10, False, True, True),
    ("NVIDIA GB300", 10, False, True, True),
    ("NVIDIA RTX PRO 6000 Blackwell", 12, False, False, False),
]
BACKENDS = ("deepep", "hybridep", "ncclep")
CASES = [
    (name, major, backend, is_good)
    for name, major, *goods in GPUS
    for backend, is_good in zip(BACKENDS, goods)
]

TEXT = {
    "deepep": "DeepEP is supported for Ampere, Hopper, and Blackwell (B200/B300) GPUs. "
    "Current GPU: {name}. ",
    "hybridep": "HybridEP is supported for GB200, GB300 with NVL72 and for Ampere, Hopper, B200 "
    "and B300 GPUs. Current GPU: {name}. ",
    "ncclep": "NCCL EP is supported for Hopper and Blackwell GPUs. Current GPU: {name}. ",
}


def moe(dispatcher="allgather", backend="before", experts=8):
    return SimpleNamespace(
        num_moe_experts=experts,
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend=backend,
        moe_shared_expert_overlap=True,
    )


def flex(backend):
    config = moe("flex", backend)
    config.moe_shared_expert_overlap = False
    return config


def no_probe():
    return AssertionError("the GPU was asked")


@pytest.mark.parametrize("major", [7, 9, None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_apply_asks_no_gpu(gpu, caplog, major, backend):
    gpu(major, error=no_probe())
    config = moe()
    assert apply_flex_dispatcher_backend(config, backend) is None
    assert config == flex(backend) and not caplog.messages


@pytest.mark.parametrize("experts", [None, 0])
def test_apply_without_experts(caplog, experts):
    config = moe(experts=experts)
    apply_flex_dispatcher_backend(config, "deepep")
    assert config == moe(experts=experts)
    (text,) = caplog.messages
    assert text.startswith("Flex dispatcher backends are only applicable to MoE models. ")
    assert caplog.records[0].levelname == "WARNING"


def test_apply_without_the_attribute(caplog):
    config = SimpleNamespace()
    apply_flex_dispatcher_backend(config, "deepep")
    assert config == SimpleNamespace() and len(caplog.messages) == 1


@pytest.mark.parametrize("arguments", [(), (None,)])
@pytest.mark.parametrize("experts", [8, 0])
def test_none_is_alltoall(caplog, arguments, experts):
    config = moe("flex", "deepep", experts)
    apply_flex_dispatcher_backend(config, *arguments)
    assert config == moe("alltoall", None, experts)  # shared overlap stays on
    assert not caplog.messages


@pytest.mark.parametrize("experts", [8, 0])
@pytest.mark.parametrize("backend", ["deepepv2", "DeepEP", "", 3])
def test_apply_refuses_another_backend(backend, experts):
    config = moe(experts=experts)
    with pytest.raises(ValueError) as caught:
        apply_flex_dispatcher_backend(config, backend)
    assert str(caught.value) == (
        f"moe_flex_dispatcher_backend = {backend!r} "
        "(expected one of deepep, hybridep, ncclep, or None for alltoall)"
    )
    assert config == moe(experts=experts)


def test_a_cleared_backend_restores_alltoall(gpu):
    gpu(9, error=no_probe())
    config = moe()
    apply_flex_dispatcher_backend(config, "hybridep")
    apply_flex_dispatcher_backend(config, None)
    validate_flex_dispatcher_backend(config)
    assert config.moe_token_dispatcher_type == "alltoall"


def test_only_rank_0_warns(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    apply_flex_dispatcher_backend(moe(experts=0), "deepep")
    assert not caplog.messages


def test_the_rank_is_the_process_groups(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert module._rank() == 3
    monkeypatch.setattr(module.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(module.torch.distributed, "get_rank", lambda: 5)
    assert module._rank() == 5


@pytest.mark.parametrize("name, major, backend, is_good", CASES)
def test_validate(gpu, name, major, backend, is_good):
    gpu(major, name)
    config = flex(backend)
    if is_good:
        validate_flex_dispatcher_backend(config)
    else:
        with pytest.raises(ValueError) as caught:
            validate_flex_dispatcher_backend(config)
        text = str(caught.value)
        assert text.startswith(TEXT[backend].format(name=name))
        assert "moe_token_dispatcher_type='alltoall'" in text
    assert config == flex(backend)


@pytest.mark.parametrize("backend", [None, "deepepv2"])
def test_validate_refuses_flex_without_a_backend_it_knows(gpu, backend):
    gpu(9, error=no_probe())
    config = moe("flex", backend)
    match = f"moe_flex_dispatcher_backend = {backend!r} .*deepep, hybridep, ncclep; for alltoall"
    with pytest.raises(ValueError, match=match):
        validate_flex_dispatcher_backend(config)
    assert config == moe("flex", backend)


@pytest.mark.parametrize("backend", ["deepep", "deepepv2", None])
def test_validate_leaves_other_dispatchers_alone(gpu, backend):
    gpu(7, error=no_probe())
    config = moe("alltoall", backend)
    validate_flex_dispatcher_backend(config)
    assert config == moe("alltoall", backend)


def test_validate_hands_on_errors_of_the_probe(gpu):
    gpu(9, error=RuntimeError("no driver"))
    with pytest.raises(RuntimeError, match="no driver"):
        validate_flex_dispatcher_backend(flex("hybridep"))


def test_the_backend_alone_does_nothing(gpu):
    gpu(7, "Tesla V100")
    config = moe("alltoall", "deepep")
    validate_flex_dispatcher_backend(config)
    assert config.moe_token_dispatcher_type == "alltoall"
