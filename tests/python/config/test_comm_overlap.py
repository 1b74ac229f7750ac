# SPDX-License-Identifier: Apache-2.0
"""CommOverlapConfig: Bridge's rules through setup(), and what setup() writes."""

from dataclasses import asdict, dataclass
from types import SimpleNamespace

import pytest
from rule_cases import COMMON_RULES, NEEDS_FUSION, NEEDS_TE, OVERLAP

from weft.config import CommOverlapConfig, OverlapModelConfig, _set_moe_a2a_overlap_overrides
from weft.config import comm_overlap as derive_module

MISSING_SPACE = "delay_wgrad_compute. Current TE version: "


def ddp(**changes):
    return SimpleNamespace(
        **{
            "use_distributed_optimizer": False,
            "overlap_grad_reduce": False,
            "overlap_param_gather": True,
            "align_param_gather": None,
            "bucket_size": 7,
            **changes,
        }
    )


def user(**changes):
    return CommOverlapConfig(tp_comm_overlap=False, **changes)


def refused(config, model_config, ddp_config=None, error=AssertionError):
    """The text of the refusal, which must leave the model as it was."""
    before = asdict(model_config)
    with pytest.raises(error) as caught:
        config.setup(model_config, None, ddp_config or ddp())
    assert asdict(model_config) == before
    return str(caught.value)


BRIDGE_RULES = [
    *COMMON_RULES,
    (
        "3b",
        {"expert_model_parallel_size": 1},
        {"expert_model_parallel_size": 2},
        f"{OVERLAP} is only supported when expert_model_parallel_size > 1",
    ),
    (
        "4",
        {"num_moe_experts": 1},
        {"num_moe_experts": 2},
        f"{OVERLAP} is only supported when num_moe_experts > 1, but got 1",
    ),
    (
        "5b",
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_token_dispatcher_type": "flex"},
        f"{OVERLAP} is only supported when moe_token_dispatcher_type == 'alltoall' or 'flex', "
        "but got allgather",
    ),
    (
        "10b",
        {"bf16": False},
        {"fp16": True},
        f"{OVERLAP} is only supported when using bf16 or fp16 models",
    ),
]


@pytest.mark.parametrize("number, wrong, mended, text", BRIDGE_RULES)
def test_overlap(model, installed, number, wrong, mended, text):
    config = user(overlap_moe_expert_parallel_comm=True)
    assert refused(config, model(**wrong)) == text
    config.setup(model(**{**wrong, **mended}), None, ddp())
    for off in (None, False):  # the rules hold for the user's True only
        user(overlap_moe_expert_parallel_comm=off).setup(model(**wrong), None, ddp())


def test_rule_1(model, installed):
    installed(torch_version="2.5.1")
    config = user(overlap_moe_expert_parallel_comm=True)
    assert refused(config, model()) == (
        "A2A Overlap encounters hang issue with torch version < 2.6.0"
    )
    installed(torch_version="2.6.0")
    config.setup(model(), None, ddp())


def test_rule_4_without_a_number(model, installed):
    config = user(overlap_moe_expert_parallel_comm=True)
    assert "num_moe_experts" in refused(config, model(num_moe_experts=None), error=TypeError)


GRAPHED = {"cuda_graph_modules": ["attn"]}
ROUTER = {"cuda_graph_scope": ["moe_router"], "moe_shared_expert_intermediate_size": 64}
NO_BIAS = "CUDA graph with delay_wgrad_compute does not support attention bias for now."

DELAY_RULES = [
    (
        "19b",
        {"gradient_accumulation_fusion": True},
        "2.6.0",
        "2.7.0",
        "TE version >= 2.7.0 is required for gradient_accumulation_fusion when using"
        f"{MISSING_SPACE}2.6.0",
    ),
    (
        "19",
        {"gradient_accumulation_fusion": False},
        "2.6.0",
        "2.7.0",
        "disabling gradient_accumulation_fusion is only supported with TE >= 2.7.0 "
        "when enabling delay_wgrad_compute",
    ),
    ("20", GRAPHED, "2.11.0", "2.12.0", NEEDS_TE),
    ("20", ROUTER, "2.11.0", "2.12.0", NEEDS_TE),
]


@pytest.mark.parametrize("number, settings, old, new, text", DELAY_RULES)
def test_delayed_gradients_need_a_version(model, installed, number, settings, old, new, text):
    config = user(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    installed(te=old)
    assert refused(config, model(**settings)) == text
    installed(te=new)
    config.setup(model(**settings), None, ddp())


@pytest.mark.parametrize("side", ["ddp", "user"])
def test_rules_18_and_18b(model, installed, side):
    config = user(
        overlap_moe_expert_parallel_comm=True,
        delay_wgrad_compute=True,
        overlap_grad_reduce=True if side == "user" else None,
    )
    reduces = ddp(overlap_grad_reduce=side == "ddp")
    installed(te="2.6.0")
    assert refused(config, model(), reduces) == (
        f"TE version >= 2.7.0 is required for overlap_grad_reduce when using{MISSING_SPACE}2.6.0"
    )
    installed(te="2.7.0")  # enough for Bridge, not for Megatron
    assert refused(config, model(), reduces) == (
        "overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling delay_wgrad_compute"
    )
    installed(te="2.8.0")
    config.setup(model(), None, reduces)
    installed(te="2.7.0")
    quiet = user(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    quiet.setup(model(), None, ddp())


def test_rule_15b(model, installed):
    config = user(delay_wgrad_compute=True)
    off = model(overlap_moe_expert_parallel_comm=False)
    assert refused(config, off) == f"{OVERLAP} is required for delay_wgrad_compute"
    config.setup(model(), None, ddp())
    both = user(delay_wgrad_compute=True, overlap_moe_expert_parallel_comm=True)
    both.setup(off, None, ddp())


def test_rule_21(model, installed):
    config = user(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    broken = model(**GRAPHED, gradient_accumulation_fusion=False)
    assert refused(config, broken).startswith(NEEDS_FUSION)
    config.setup(model(gradient_accumulation_fusion=False), None, ddp())
    config.setup(model(**GRAPHED), None, ddp())


@pytest.mark.parametrize("bias", ["add_bias_linear", "add_qkv_bias"])
def test_rule_22b(model, installed, bias):
    config = user(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    assert refused(config, model(**GRAPHED, **{bias: True})) == NO_BIAS
    config.setup(model(**ROUTER, **{bias: True}), None, ddp())


def test_a_model_without_the_field(installed):
    bare = SimpleNamespace(num_moe_experts=8)
    with pytest.raises(AssertionError, match=f"does not have {OVERLAP}"):
        user().setup(bare, None, ddp())


def test_defaults():
    with pytest.raises(TypeError):
        CommOverlapConfig()
    with pytest.raises(TypeError):
        CommOverlapConfig(False)
    values = asdict(user())
    assert values.pop("tp_comm_overlap") is False
    assert values.pop("tp_comm_bootstrap_backend") == "nccl"
    assert len(values) == 13 and set(values.values()) == {None}


def test_setup_overwrites_the_model(model, installed, caplog):
    direct = model(delay_wgrad_compute=True)
    user().setup(direct, None, ddp())
    assert not direct.overlap_moe_expert_parallel_comm and not direct.delay_wgrad_compute
    assert caplog.text.count("overwritten with False") == 2

    caplog.clear()
    chosen = model(overlap_moe_expert_parallel_comm=False)
    user(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True).setup(chosen, None, ddp())
    assert chosen.overlap_moe_expert_parallel_comm and chosen.delay_wgrad_compute
    assert not caplog.text


def test_finalize_takes_the_values_once(model, installed):
    config = user(overlap_moe_expert_parallel_comm=True)
    config.finalize()
    config.overlap_moe_expert_parallel_comm = False
    config.finalize()
    chosen = model(overlap_moe_expert_parallel_comm=False)
    config.setup(chosen, None, ddp())
    assert chosen.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize(
    "pipeline, chunks, overlapped, batched",
    [(1, None, False, False), (2, None, False, True), (2, 2, True, False)],
)
def test_pipeline(installed, pipeline, chunks, overlapped, batched):
    layout = OverlapModelConfig(
        pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=chunks
    )
    user().setup(layout, None, ddp())
    assert (layout.overlap_p2p_comm, layout.batch_p2p_comm) == (overlapped, batched)
    user(overlap_p2p_comm=not overlapped).setup(layout, None, ddp())
    assert layout.overlap_p2p_comm is not overlapped


def test_data_parallel(installed):
    layout = OverlapModelConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    optimizer = SimpleNamespace(overlap_param_gather=None)
    config = user(data_parallel_size=2, overlap_param_gather=False)

    untouched = ddp()
    config.setup(layout, optimizer, untouched)
    assert untouched == ddp() and optimizer.overlap_param_gather is None

    written = ddp(use_distributed_optimizer=True)
    config.setup(layout, optimizer, written)
    assert written.overlap_grad_reduce and written.align_param_gather
    assert written.bucket_size == 128 * 1024 * 1024
    assert written.overlap_param_gather is False and optimizer.overlap_param_gather is False
    assert not hasattr(written, "overlap_param_gather_with_optimizer_step")

    alone = ddp(use_distributed_optimizer=True, overlap_grad_reduce=True)
    user(data_parallel_size=1).setup(layout, optimizer, alone)
    assert not alone.overlap_grad_reduce and alone.bucket_size is None

    unknown = ddp(use_distributed_optimizer=True)
    user(align_param_gather=True).setup(layout, optimizer, unknown)
    assert unknown.align_param_gather is True and unknown.bucket_size == 7


@dataclass
class TensorParallelOverlap:
    qkv_fprop: int | None = 4
    fc2_fprop: int | None = None


@pytest.mark.parametrize(
    "size, sequence, te, warning",
    [
        (1, True, True, "TP size < 2"),
        (2, False, True, "sequence_parallel=False"),
        (2, True, False, "TE not detected"),
        (2, True, True, None),
    ],
)
def test_tensor_parallel(installed, monkeypatch, caplog, size, sequence, te, warning):
    monkeypatch.setattr(derive_module, "find_spec", lambda name: object() if te else None)
    layout = OverlapModelConfig(tensor_model_parallel_size=size, sequence_parallel=sequence)
    config = CommOverlapConfig(tp_comm_overlap=True, tp_comm_overlap_cfg=TensorParallelOverlap())
    config.setup(layout, None, ddp())
    assert layout.tp_comm_overlap is (warning is None)
    assert layout.tp_comm_overlap_cfg == (None if warning else {"qkv_fprop": 4})
    without = SimpleNamespace(**{k: v for k, v in vars(layout).items() if "overlap_cfg" not in k})
    config.setup(without, None, ddp())
    assert without.tp_comm_overlap_cfg == layout.tp_comm_overlap_cfg
    assert layout.tp_comm_bootstrap_backend == "nccl"
    assert (warning or "") in caplog.text and bool(caplog.text) is bool(warning)


def test_moe_a2a_overlap_overrides():
    def make():
        return SimpleNamespace(
            comm_overlap=None,
            model=OverlapModelConfig(tensor_model_parallel_size=2, moe_shared_expert_overlap=True),
        )

    off = make()
    assert _set_moe_a2a_overlap_overrides(off) is off and off == make()

    recipe = make()
    assert _set_moe_a2a_overlap_overrides(recipe, moe_a2a_overlap=True) is recipe
    made = recipe.comm_overlap
    assert made.tp_comm_overlap is True
    assert made.overlap_moe_expert_parallel_comm is True and made.delay_wgrad_compute is True
    assert recipe.model.moe_shared_expert_overlap is False

    recipe.comm_overlap = kept = user(bucket_size=3)
    _set_moe_a2a_overlap_overrides(recipe, True)
    assert recipe.comm_overlap is kept and kept.delay_wgrad_compute is True
