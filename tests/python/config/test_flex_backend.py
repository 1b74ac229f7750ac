# SPDX-License-Identifier: Apache-2.0
"""Which GPU gets which backend, with the GPU replaced."""

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

APPLY_TEXT = {
    "deepep": "DeepEP is only applicable to Ampere, Hopper, and Blackwell (B200/B300) GPUs. "
    "Current GPU: {name}. Falling back to alltoall.",
    "hybridep": "HybridEP is only applicable for GB200, GB300 with NVL72 and for Ampere, Hopper, "
    "B200 and B300 GPUs. Current GPU: {name}. Falling back to alltoall.",
    "ncclep": "NCCL EP is only applicable to Hopper and Blackwell GPUs. Current GPU: {name}. "
    "Falling back to alltoall.",
}
VALIDATE_TEXT = {
    "deepep": "DeepEP is supported for Ampere, Hopper, and Blackwell (B200/B300) GPUs. "
    "Current GPU: {name}",
    "hybridep": "HybridEP is supported for GB200, GB300 with NVL72 and for Ampere, Hopper, B200 "
    "and B300 GPUs",
    "ncclep": "NCCL EP is supported for Hopper and Blackwell GPUs. Current GPU: {name}",
}
INVALID = "Not a valid flex dispatcher backend. Skipping flex dispatcher backend configuration."


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


@pytest.mark.parametrize("name, major, backend, is_good", CASES)
def test_apply(gpu, caplog, name, major, backend, is_good):
    gpu(major, name)
    config = moe()
    assert apply_flex_dispatcher_backend(config, backend) is None
    if is_good:
        assert config == flex(backend) and not caplog.messages
    else:
        assert config == moe("alltoall", None)  # shared overlap stays on
        assert caplog.messages == [APPLY_TEXT[backend].format(name=name)]
        assert caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize("experts", [None, 0])
def test_apply_without_experts(gpu, caplog, experts):
    gpu(9, error=no_probe())
    config = moe(experts=experts)
    apply_flex_dispatcher_backend(config, "deepep")
    assert config == moe(experts=experts)
    (text,) = caplog.messages
    assert text.startswith("DeepEP and HybridEP are only applicable to MoE models. ")


def test_apply_without_the_attribute(gpu, caplog):
    gpu(9, "NVIDIA H100")
    config = SimpleNamespace()
    apply_flex_dispatcher_backend(config, "deepep")
    assert config == SimpleNamespace() and len(caplog.messages) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_apply_without_cuda(gpu, caplog, backend):
    gpu(None, error=no_probe())
    config = moe()
    apply_flex_dispatcher_backend(config, backend)
    assert config == flex(backend) and not caplog.messages


@pytest.mark.parametrize("backend", [None, "deepepv2", "DeepEP", ""])
def test_apply_with_another_backend(gpu, caplog, backend):
    gpu(9, "NVIDIA H100")
    config = moe()
    apply_flex_dispatcher_backend(config, backend)
    assert config == moe() and caplog.messages == [INVALID]


def test_another_backend_is_the_default(gpu, caplog):
    gpu(9, "NVIDIA H100")
    apply_flex_dispatcher_backend(moe())
    assert caplog.messages == [INVALID]


@pytest.mark.parametrize("major, backend", [(9, "deepep"), (9, "hybridep"), (None, "deepepv2")])
def test_apply_hands_on_errors_of_the_probe(gpu, major, backend):
    gpu(major, error=RuntimeError("no driver"))
    config = moe()
    with pytest.raises(RuntimeError, match="no driver"):
        apply_flex_dispatcher_backend(config, backend)
    assert config == moe()


def test_only_rank_0_warns(gpu, caplog, monkeypatch):
    gpu(7, "Tesla V100")
    monkeypatch.setenv("RANK", "1")
    config = moe()
    apply_flex_dispatcher_backend(config, "deepep")
    apply_flex_dispatcher_backend(moe(experts=0), "deepep")
    apply_flex_dispatcher_backend(moe(), "other")
    assert config == moe("alltoall", None) and not caplog.messages


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
        assert str(caught.value) == VALIDATE_TEXT[backend].format(name=name)
    assert config == flex(backend)


def test_validate_without_a_backend(gpu):
    gpu(None, error=no_probe())
    config = moe("flex", None)
    validate_flex_dispatcher_backend(config)
    assert config == moe("alltoall", None)


@pytest.mark.parametrize("dispatcher, backend", [("alltoall", "deepep"), ("flex", "deepepv2")])
def test_validate_leaves_others_alone(gpu, dispatcher, backend):
    gpu(7, error=no_probe())
    config = moe(dispatcher, backend)
    validate_flex_dispatcher_backend(config)
    assert config == moe(dispatcher, backend)


def test_validate_hands_on_errors_of_the_probe(gpu):
    gpu(9, error=RuntimeError("no driver"))
    with pytest.raises(RuntimeError, match="no driver"):
        validate_flex_dispatcher_backend(flex("hybridep"))


def test_the_backend_alone_does_nothing(gpu):
    gpu(7, "Tesla V100")
    config = moe("alltoall", "deepep")
    validate_flex_dispatcher_backend(config)
    assert config.moe_token_dispatcher_type == "alltoall"
