# SPDX-License-Identifier: Apache-2.0
"""Names, order and defaults of arguments, and numbers of gradients, for both projects' callers."""

import inspect
import warnings
from unittest.mock import Mock

import pytest
import torch

import weft.fused_a2a as fa

NONE = inspect.Parameter.empty
STREAMS = [("async_finish", False), ("allocate_on_comm_stream", False)]
DISPATCH = [(n, NONE) for n in ("x", "token_indices", "token_probs", "num_experts", "group")]
COMBINE = [(n, NONE) for n in ("x", "group", "handle")]
HYBRID = [(n, NONE) for n in ("x", "routing_map", "probs", "group", "num_local_experts")]
SMS = [("num_sms_dispatch_api", 24), ("num_sms_combine_api", 24)]
PERMUTED = [("num_permuted_tokens", None), ("pad_multiple", None)]
V2 = [
    (n, NONE)
    for n in ("buffer", "x", "token_indices", "token_probs", "num_experts")
    + ("num_max_tokens_per_rank",)
]
POSITIONAL = {
    "get_hidden_bytes": [("x", NONE)],
    "get_buffer": [("group", NONE), ("hidden_bytes", NONE)],
    "get_uccl_buffer": [("group", NONE), ("hidden_bytes", NONE)],
    "free_buffer": [],
    "reset_hybrid_ep_buffer": [],
    "set_deepep_num_sms": [("num_sms", NONE)],
    "set_uccl_num_sms": [("num_sms", NONE)],
    "fused_dispatch": DISPATCH + STREAMS,
    "uccl_fused_dispatch": DISPATCH + STREAMS,
    "fused_combine": COMBINE + STREAMS,
    "uccl_fused_combine": COMBINE + STREAMS,
    "hybrid_ep_dispatch": HYBRID + SMS + PERMUTED,
    "hybrid_ep_combine": [("x", NONE), ("handle", NONE)] + PERMUTED + [("fused", False)],
    "get_elastic_buffer": [
        (n, NONE) for n in ("group", "num_max_tokens_per_rank", "hidden", "num_topk")
    ],
    "deepepv2_dispatch": V2 + [("expert_alignment", 1), ("num_sms", 0)] + STREAMS,
    "deepepv2_combine": [("buffer", NONE), ("x", NONE), ("handle", NONE), ("num_sms", 0)] + STREAMS,
}
FORWARD = {
    "FusedDispatch": DISPATCH + STREAMS,
    "UCCLFusedDispatch": DISPATCH + STREAMS,
    "FusedCombine": COMBINE + STREAMS,
    "UCCLFusedCombine": COMBINE + STREAMS,
    "HybridEPDispatch": HYBRID + SMS,
    "HybridEPCombine": [("x", NONE), ("handle", NONE)] + PERMUTED + [("fused", False)],
    "DeepepV2Dispatch": V2 + [("expert_alignment", NONE), ("num_sms", NONE)] + STREAMS,
    "DeepepV2Combine": [(n, NONE) for n in ("buffer", "x", "handle", "num_sms")] + STREAMS,
}


def positional(function):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind in kinds]


@pytest.mark.parametrize("name", POSITIONAL)
def test_positions(name):
    assert positional(getattr(fa, name)) == POSITIONAL[name]


@pytest.mark.parametrize("name", FORWARD)
def test_forward_positions(name):
    assert positional(getattr(fa, name).forward)[1:] == FORWARD[name]
    assert issubclass(getattr(fa, name), torch.autograd.Function)


def test_init_hybrid_positions():
    names = [name for name, _ in positional(fa.init_hybrid_ep_buffer)]
    assert names == [
        "group",
        "hidden_dim",
        "seq_len",
        "num_local_experts",
        "num_sms_dispatch_api",
        "num_sms_combine_api",
        "fp8_dispatch",
        "num_sms_preprocessing_api",
        "num_blocks_permute",
        "num_blocks_unpermute",
    ]


@pytest.mark.parametrize(
    "name, keywords",
    [
        (
            "init_hybrid_ep_buffer",
            "group hidden_dim num_tokens num_local_experts num_sms_dispatch_api "
            "num_sms_combine_api num_blocks_permute num_blocks_unpermute fp8_dispatch "
            "num_sms_preprocessing_api",
        ),
        (
            "hybrid_ep_dispatch",
            "x routing_map probs group num_local_experts num_sms_dispatch_api "
            "num_sms_combine_api num_blocks_permute num_blocks_unpermute fused "
            "num_permuted_tokens pad_multiple num_sms_preprocessing_api",
        ),
        ("hybrid_ep_combine", "x handle num_permuted_tokens pad_multiple fused"),
        (  # NeMo Automodel 0.7.0
            "hybrid_ep_dispatch",
            "x topk_idx routing_map probs num_experts group num_local_experts num_sms_dispatch_api "
            "num_sms_combine_api num_permuted_tokens pad_multiple fuse_permute "
            "num_sms_preprocessing_api num_blocks_permute num_blocks_unpermute",
        ),
        ("hybrid_ep_combine", "x handle num_permuted_tokens pad_multiple fuse_permute"),
    ],
)
def test_keywords(name, keywords):
    inspect.signature(getattr(fa, name)).bind(**dict.fromkeys(keywords.split()))


def hybrid(monkeypatch):
    """A stand-in that gives back what it gets."""
    buffer = Mock(spec=["dispatch_with_permute", "combine_with_unpermute"])
    counts = torch.tensor([1, 1])
    buffer.dispatch_with_permute.side_effect = lambda **k: (
        (k["hidden"] * 1, k["probs"] * 1, None, counts, ("handle",))
        if "probs" in k
        else (k["hidden"] * 1, None, None, None, None)
    )
    buffer.combine_with_unpermute.side_effect = lambda **k: (
        k["hidden"] * 1,
        k["probs"] * 1 if "probs" in k else None,
    )
    monkeypatch.setattr(fa, "_hybrid_ep_buffer", buffer)
    return buffer


def arguments():
    x = torch.randn(2, 4, requires_grad=True)
    probs = torch.randn(2, 2, requires_grad=True)
    return x, torch.eye(2, dtype=torch.bool), probs, None, 2, 20, 21


@pytest.mark.parametrize(
    "rest, want",
    [
        ((), (None, None, False)),
        ((8, 4), (8, 4, False)),  # NeMo Automodel: 9 arguments
        ((8, 4, True), (8, 4, True)),
        ((5, 6, False, 8, 4, 108), (8, 4, False)),  # Megatron-LM: 13
        ((None, None, True, None, 4, 108), (None, 4, True)),
        ((8, 4, None, None, True, 108, 5, 6), (8, 4, True)),  # NeMo Automodel 0.7.0: 15
        ((8, 4, None), (8, 4, False)),  # which has defaults
        ((8, 4, None, None), (8, 4, False)),
        ((8, 4, torch.zeros(2, 1), 2, True), (8, 4, True)),
    ],
)
def test_hybrid_dispatch_gradients(monkeypatch, rest, want):
    buffer = hybrid(monkeypatch)
    args = arguments()
    rows, row_probs, _, _, handle = fa.HybridEPDispatch.apply(*args, *rest)
    (rows.sum() + row_probs.sum()).backward()
    assert torch.equal(args[0].grad, torch.ones(2, 4))
    assert torch.equal(args[2].grad, torch.ones(2, 2))
    budget, pad, fused = want
    sent = buffer.dispatch_with_permute.call_args.kwargs
    assert sent["num_permuted_tokens"] == budget and sent["non_blocking"] == (budget is not None)
    assert sent["pad_multiple"] == pad and sent["num_of_experts_per_rank"] == 2
    assert sent.get("fuse_permute_dispatch") == (True if fused else None)
    back = buffer.combine_with_unpermute.call_args.kwargs
    assert back["handle"] == ("handle",) and back["pad_multiple"] == pad
    assert back.get("fuse_unpermute_combine") == (True if fused else None)
    assert back["hidden"].is_contiguous() and back["probs"].is_contiguous()
    # The number of gradients, as the function itself returns them.
    grads = rows.grad_fn._forward_cls.backward(rows.grad_fn, rows, row_probs, None, None, None)
    assert len(grads) == 7 + len(rest)
    assert [i for i, grad in enumerate(grads) if grad is not None] == [0, 2]


@pytest.mark.parametrize(
    "rest", [(), (None, None), (torch.tensor(2), 4), (2, 4, False), (2, 4, True)]
)
def test_hybrid_combine_gradients(monkeypatch, rest):
    buffer = hybrid(monkeypatch)
    x = torch.randn(2, 4, requires_grad=True)
    out = fa.HybridEPCombine.apply(x, ("handle",), *rest)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    sent = buffer.combine_with_unpermute.call_args.kwargs
    assert "probs" not in sent
    back = buffer.dispatch_with_permute.call_args.kwargs
    assert back["num_permuted_tokens"] == 2 and "probs" not in back
    fused = True if rest[2:] == (True,) else None
    assert sent.get("fuse_unpermute_combine") == back.get("fuse_permute_dispatch") == fused
    grads = out.grad_fn._forward_cls.backward(out.grad_fn, out)
    assert len(grads) == 2 + len(rest)


def test_hybrid_routing_by_indices(monkeypatch):
    buffer = hybrid(monkeypatch)
    x, _, probs, _, local, *_ = arguments()
    idx = torch.tensor([[0], [-1]])
    fa.hybrid_ep_dispatch(x, None, probs, None, local, topk_idx=idx, num_experts=2)
    sent = buffer.dispatch_with_permute.call_args.kwargs
    assert sent["topk_idx"] is idx and sent["num_of_experts"] == 2
    assert "routing_map" not in sent and sent["probs"].shape == probs.shape
    with pytest.raises(ValueError, match="neither routing_map nor topk_idx"):
        fa.hybrid_ep_dispatch(x, None, probs, None, local)
    with pytest.raises(ValueError, match="topk_idx needs num_experts"):
        fa.hybrid_ep_dispatch(x, None, probs, None, local, topk_idx=idx)


def test_old_buffers_are_used_unfused(monkeypatch):
    class Old:
        def __init__(self, **options):
            self.options = options

        def dispatch_with_permute(
            self,
            *,
            hidden,
            routing_map,
            probs,
            scaling_factor,
            num_of_experts_per_rank,
            pad_multiple,
            num_permuted_tokens,
            non_blocking,
        ):
            return hidden * 1, probs * 1, None, torch.tensor([1, 1]), ("handle",)

    monkeypatch.setattr(fa, "HybridEPBuffer", Old)
    monkeypatch.setattr(fa, "_hybrid_ep_buffer", None)
    x, routing_map, probs, _, local, *_ = arguments()
    with pytest.warns(UserWarning, match="unfused"):
        fa.hybrid_ep_dispatch(x, routing_map, probs, None, local, fused=True, num_blocks_permute=3)
    assert "num_blocks_permute" not in fa._hybrid_ep_buffer.options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa.hybrid_ep_dispatch(x, routing_map, probs, None, local)


def test_combine_without_a_buffer(monkeypatch):
    monkeypatch.setattr(fa, "_hybrid_ep_buffer", None)
    with pytest.raises(RuntimeError, match="no buffer"):
        fa.hybrid_ep_combine(torch.zeros(2, 4), ("handle",))


class Rows:
    """A stand-in for a Buffer whose ranks are this one alone."""

    group, num_nvl_bytes, num_rdma_bytes, num_sms = None, 1 << 60, 1 << 60, 20
    num_recv_tokens_per_expert_list = [2, 0]  # as a handle

    def get_dispatch_layout(self, topk_idx, num_experts, **streams):
        return 1, 2, 3, 4, "layout event"

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, **rest):
        self.last = rest
        if handle is not None:
            return (x * 1, None, None, None, None, None)[: self.num_results]
        return self.results(x * 1, topk_idx * 1, topk_weights * 1)

    def combine(self, x, handle, topk_weights=None, **rest):
        self.last = rest
        return x * 1, None if topk_weights is None else topk_weights * 1, None


class V1Rows(Rows):
    num_results = 6

    def results(self, *tensors):
        return (*tensors, [2, 0], self, None)


class V2Rows(Rows):
    num_results = 5

    def results(self, *tensors):
        return (*tensors, self, None)


@pytest.mark.parametrize("name", ["Fused", "UCCLFused"])
@pytest.mark.parametrize("rest", [(), (False,), (False, False)])
def test_row_gradients(monkeypatch, name, rest):
    for state in ("_buffer", "_uccl_buffer"):
        monkeypatch.setattr(fa, state, V1Rows())
    size = Mock()
    size.size.return_value = 2
    for state in (fa._buffer, fa._uccl_buffer):
        state.group = size
    x, _, probs, *_ = arguments()
    idx = torch.zeros(2, 2, dtype=torch.int64)
    dispatch, combine = getattr(fa, f"{name}Dispatch"), getattr(fa, f"{name}Combine")
    rows, row_idx, row_probs, counts, handle = dispatch.apply(x, idx, probs, 2, size, *rest)
    assert counts.tolist() == [2, 0] and counts.dtype == torch.int64
    out, second = combine.apply(rows, size, handle, *rest)
    assert second is None
    (out.sum() + row_probs.sum()).backward()
    assert torch.equal(x.grad, torch.ones(2, 4)) and torch.equal(probs.grad, torch.ones(2, 2))
    made = out.grad_fn._forward_cls.backward(out.grad_fn, out, None)
    assert len(made) == 5
    made = rows.grad_fn._forward_cls.backward(rows.grad_fn, rows, None, row_probs, None, None)
    assert len(made) == 7 and [i for i, g in enumerate(made) if g is not None] == [0, 2]


def test_elastic_gradients():
    buffer = V2Rows()
    x, _, probs, *_ = arguments()
    idx = torch.zeros(2, 2, dtype=torch.int64)
    rows, _, row_probs, counts, handle = fa.DeepepV2Dispatch.apply(
        buffer, x, idx, probs, 2, 64, 1, 0
    )
    assert counts.tolist() == [2, 0]
    out, second = fa.DeepepV2Combine.apply(buffer, rows, handle, 0)
    assert second is None
    out.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.ones(2, 4)) and torch.equal(probs.grad, torch.zeros(2, 2))
    made = out.grad_fn._forward_cls.backward(out.grad_fn, out, None)
    assert len(made) == 6 and buffer.last["num_sms"] == 20
    made = rows.grad_fn._forward_cls.backward(rows.grad_fn, rows, None, row_probs, None, None)
    assert len(made) == 10 and [i for i, g in enumerate(made) if g is not None] == [1, 3]


def test_a_parameter_is_looked_for():
    def function(a, *, fuse_permute_dispatch=False):
        pass

    assert fa._has_parameter(function, "fuse_permute_dispatch")
    assert not fa._has_parameter(function, "b") and not fa._has_parameter(3, "a")
