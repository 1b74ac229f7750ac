# SPDX-License-Identifier: Apache-2.0
"""The rules without a number: sharded parameters, the oldest TE, and what is only warned of."""

from types import SimpleNamespace

import pytest
from rule_cases import OVERLAP

from weft.config import (
    CommOverlapConfig,
    validate_delayed_linear,
    validate_model_overlap,
    validate_overlap_arguments,
    validate_sharded_overlap,
)


class TransformerLayer:
    pass


class MambaLayer:
    pass


class Embedding:
    pass


def fsdp(**changes):
    return SimpleNamespace(**{"use_megatron_fsdp": True, **changes})


def text_of(error, function, *arguments):
    with pytest.raises(error) as caught:
        function(*arguments)
    return str(caught.value)


DOUBLE = (
    "1F1B overlap with FSDP does not support double buffer. "
    "Please set fsdp_double_buffer=False in the ddp config."
)
GRAPHS = "1F1B overlap with FSDP does not support per-layer CUDA graphs (cuda_graph_impl={!r}, "
CHUNKS = (
    "EP overlap 1F1B with FSDP is not supported for interleaved pipeline parallelism "
    "(virtual_pipeline_model_parallel_size > 1), but got 2 chunks."
)

# Settings of the model and of data parallelism that break a rule, the change of either that mends
# them, and the text.
SHARDING_RULES = [
    ({}, {"fsdp_double_buffer": True}, {"fsdp_double_buffer": False}, DOUBLE),
    (
        {"cuda_graph_impl": "local"},
        {},
        {"cuda_graph_impl": "none"},
        GRAPHS.format("local"),
    ),
    (
        {"cuda_graph_impl": "transformer_engine"},
        {},
        {"cuda_graph_impl": "full_iteration"},
        GRAPHS.format("transformer_engine"),
    ),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        {},
        {"virtual_pipeline_model_parallel_size": 1},
        CHUNKS,
    ),
]


@pytest.mark.parametrize("settings, ddp, mended, text", SHARDING_RULES)
def test_sharded_parameters(model, installed, settings, ddp, mended, text):
    config = model(**settings)
    found = text_of(AssertionError, validate_sharded_overlap, config, fsdp(**ddp))
    assert found.startswith(text)
    validate_sharded_overlap(config, SimpleNamespace(**ddp))  # not sharded
    validate_sharded_overlap(model(**{**settings, OVERLAP: False}), fsdp(**ddp))
    of_model = {name: value for name, value in mended.items() if hasattr(config, name)}
    of_ddp = {name: value for name, value in mended.items() if name not in of_model}
    validate_sharded_overlap(model(**{**settings, **of_model}), fsdp(**{**ddp, **of_ddp}))


@pytest.mark.parametrize("settings, ddp, mended, text", SHARDING_RULES)
def test_setup_refuses_what_cannot_be_wrapped(model, installed, settings, ddp, mended, text):
    overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True)
    config = model(**{**settings, OVERLAP: False})
    assert text_of(AssertionError, overlap.setup, config, None, fsdp(**ddp)).startswith(text)
    assert not config.overlap_moe_expert_parallel_comm
    off = CommOverlapConfig(tp_comm_overlap=False)
    off.setup(config, None, fsdp(**ddp))


def test_units_of_sharded_parameters(model):
    ddp = fsdp(data_parallel_sharding_strategy="optim_grads_params")
    for good in (None, [TransformerLayer], [MambaLayer, TransformerLayer]):
        validate_sharded_overlap(model(), ddp, good)
    for units, names in (([TransformerLayer, Embedding], "'Embedding'"), ([], "got []")):
        text = text_of(AssertionError, validate_sharded_overlap, model(), ddp, units)
        assert text.startswith(
            "EP overlap with FSDP currently requires fsdp_unit_modules to contain only supported "
        )
        assert names in text
        for strategy in ("no_shard", "optim", "optim_grads"):
            other = fsdp(data_parallel_sharding_strategy=strategy)
            validate_sharded_overlap(model(), other, units)


def test_version_2_with_delayed_gradients(model, installed):
    both = model(delay_wgrad_compute=True)
    text = "MFSDP v2 does not currently support delay_wgrad_compute."
    assert (
        text_of(ValueError, validate_sharded_overlap, both, fsdp(megatron_fsdp_version=2)) == text
    )
    validate_sharded_overlap(both, fsdp(megatron_fsdp_version=1))
    validate_sharded_overlap(both, SimpleNamespace(megatron_fsdp_version=2))
    validate_sharded_overlap(model(), fsdp(megatron_fsdp_version=2))
    user = CommOverlapConfig(
        tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True
    )
    ddp = fsdp(megatron_fsdp_version=2, overlap_grad_reduce=False)
    config = model()
    assert text_of(ValueError, user.setup, config, None, ddp) == text
    assert not config.delay_wgrad_compute
    user.delay_wgrad_compute = False  # too late: setup() took the values down
    assert text_of(ValueError, user.setup, config, None, ddp) == text


@pytest.mark.parametrize("te", ["2.2.9", None])
def test_linear_layers_that_delay_need_a_version(model, installed, te):
    installed(te=te)
    text = "Only TE with version >=2.3.0 supports delay_wgrad_compute now."
    delayed = model(delay_wgrad_compute=True)
    assert text_of(RuntimeError, validate_delayed_linear, delayed) == text
    validate_delayed_linear(model())
    validate_delayed_linear(model(delay_wgrad_compute=True, transformer_impl="local"))
    installed(te="2.3.0")
    validate_delayed_linear(delayed)


PARALLEL = [{"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}]


@pytest.mark.parametrize("settings", PARALLEL)
def test_connections_of_the_device(model, gpu, caplog, monkeypatch, settings):
    for major in (8, 9):
        gpu(major)
        validate_overlap_arguments(model(**settings))
        (text,) = caplog.messages
        assert text.startswith(
            "For Hopper and before, try not to use tensor model parallelism or context "
            f"parallelism with {OVERLAP}"
        )
        assert "CUDA_DEVICE_MAX_CONNECTIONS" in text
        assert caplog.records[0].levelname == "WARNING"
        caplog.clear()
    sharded = model(**settings)
    sharded.use_megatron_fsdp = True
    for quiet in (model(), model(**{**settings, OVERLAP: False}), sharded):
        validate_overlap_arguments(quiet)
    monkeypatch.setenv("RANK", "1")
    validate_overlap_arguments(model(**settings))
    monkeypatch.delenv("RANK")
    for newer in (10, None):  # Blackwell, no CUDA
        gpu(newer)
        validate_overlap_arguments(model(**settings))
    assert not caplog.messages


def test_zero_copy(model, installed, caplog):
    flex = {"moe_token_dispatcher_type": "flex", "moe_ncclep_zero_copy": True}
    ncclep = {**flex, "moe_flex_dispatcher_backend": "ncclep"}
    validate_model_overlap(model(**ncclep))
    (text,) = caplog.messages
    assert text.startswith(f"moe_ncclep_zero_copy with {OVERLAP}: each backward of a dispatch ")
    caplog.clear()
    validate_model_overlap(model(**{**ncclep, OVERLAP: False}))
    validate_model_overlap(model(**{**ncclep, "moe_ncclep_zero_copy": False}))
    validate_model_overlap(model(**{**ncclep, "moe_token_dispatcher_type": "alltoall"}))
    validate_model_overlap(model(**flex, moe_flex_dispatcher_backend="hybridep"))
    assert not caplog.messages
