# SPDX-License-Identifier: Apache-2.0
"""Weft's modules in the place of Automodel's: names, the capacity that is published, and what is
run before a pipeline's first step."""

import ast

import automodel_modules as automodel
import pytest
import torch

import weft
from ranks import device_of

HIDDEN, EXPERTS, TOPK = 32, 8, 2


def imported_names() -> set[tuple[str, str]]:
    """(module, name) of all that Automodel's package imports from the two."""
    found = set()
    for path in automodel.source("nemo_automodel").rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in automodel.NAMES):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            module = node.module.rpartition(".")[2]
            if module in automodel.NAMES:
                found.update((module, alias.name) for alias in node.names)
    return found


def test_whatever_automodel_imports_is_there():
    weft_modules = dict(zip(automodel.NAMES, automodel.modules("weft")))
    names = imported_names()
    assert ("fused_a2a", "DispatchReplayRecorder") in names and len(names) > 12
    missing = [pair for pair in names if not hasattr(weft_modules[pair[0]], pair[1])]
    assert not missing


@pytest.mark.parametrize("index", [0, 1])
def test_every_name_of_its_own_is_there(index):
    """State, private functions and flags too: its unit tests assign them."""
    own, ours = automodel.modules("automodel")[index], automodel.modules("weft")[index]
    path = automodel.source(own.__name__).with_suffix(".py")
    names = {name for name in vars(own) if not name.startswith("__")}
    defined = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    missing = {name for name in names & defined if not hasattr(ours, name)}
    assert missing <= {
        "_DispatchReplayState",  # the classes of thread-local state
        "_HybridEPDispatchReplayState",
        "_HYBRIDEP_TOKEN_ALIGNMENT",  # of padding, which there is none of
        "_STATIC_ROUTING_PAD_PIN",
        "logger",
    }


def test_functions_can_be_replaced_in_either_module(monkeypatch):
    fused_a2a, dispatcher = automodel.modules("weft")
    manager = dispatcher._HybridEPManager(None, 2, 2, 1)
    manager.routing_map = torch.ones(1, 2, dtype=torch.bool)
    manager.token_probs = torch.ones(1, 2)

    def replaced(where):
        calls = []

        def dispatch(**options):
            calls.append(options)
            return options["x"], options["probs"], None, torch.tensor([1, 0]), "handle"

        monkeypatch.setattr(where, "hybrid_ep_dispatch", dispatch)
        manager.dispatch(torch.ones(1, 4))
        return calls

    assert len(replaced(fused_a2a)) == 1
    assert len(replaced(dispatcher)) == 1
    with pytest.raises(AttributeError, match="has no attribute 'hybrid_ep_nothing'"):
        _ = dispatcher.hybrid_ep_nothing


@pytest.mark.parametrize("whose", automodel.WHOSE)
def test_capacity_is_kept_for_one_signature(whose):
    fused_a2a, _ = automodel.modules(whose)
    get = fused_a2a.get_hybrid_ep_initialized_capacity
    publish = fused_a2a.publish_hybrid_ep_initialized_capacity
    fused_a2a.reset_hybrid_ep_buffer()
    assert get(("a",)) == get(("b",)) == 0
    publish(("a",), 512)
    publish(("a",), 256)
    assert get(("a",)) == fused_a2a._hybrid_ep_initialized_capacity == 512
    assert fused_a2a._hybrid_ep_runtime_signature == ("a",)
    for call in (get, lambda signature: publish(signature, 1024)):
        with pytest.raises(RuntimeError, match="already active with an incompatible signature"):
            call(("b",))
    assert get(("a",)) == 512
    fused_a2a.reset_hybrid_ep_buffer()
    assert get(("b",)) == 0 and fused_a2a._hybrid_ep_runtime_signature is None


def test_no_kernels_are_kept():
    fused_a2a, _ = automodel.modules("weft")
    assert fused_a2a._warm_start_hybrid_ep_jit() is False
    assert fused_a2a.store_hybrid_ep_jit_cache() == 0
    assert fused_a2a._JIT_CACHE_ROOT is None
    assert fused_a2a._hybrid_ep_jit_dirs() == (None, None)
    assert fused_a2a._deep_ep_version() == weft.__version__


def manager_of(module, group, **settings):
    rank, local = group.rank(), EXPERTS // group.size()
    config = module.TokenDispatcherConfig(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_share_token_dispatcher=False,
        **settings,
    )
    own = list(range(rank * local, (rank + 1) * local))
    return module.MoEFlexTokenDispatcher(local, own, config, group)


def prepared(rank, num_ranks, group, whose, settings):
    fused_a2a, module = automodel.modules(whose)
    fused_a2a.reset_hybrid_ep_buffer()
    hybrid = {"moe_flex_dispatcher_backend": "hybridep", **settings}
    dispatcher = manager_of(module, group, **hybrid)
    sizes = {"hidden_dim": HIDDEN, "dtype": torch.float32}
    assert manager_of(module, group).get_pipeline_runtime_initializers(**sizes) == ()
    (initializer,) = dispatcher.get_pipeline_runtime_initializers(**sizes)
    manager, device = dispatcher._comm_manager, device_of(rank)
    before = vars(manager).copy()
    runs, run = [], manager.initialize_runtime
    manager.initialize_runtime = lambda **given: (runs.append(given), run(**given))

    def capacity():
        return fused_a2a.get_hybrid_ep_initialized_capacity((*initializer.signature, device))

    with automodel.without_gpu():
        initializer.prepare(num_tokens=(3, 600)[rank], device=device)  # the largest counts
        assert fused_a2a._hybrid_ep_buffer is not None
        initializer.prepare(num_tokens=512, device=device)
        found = [capacity(), len(runs)]
        with torch.inference_mode():  # where gradients are off
            initializer.prepare(num_tokens=700, device=device)
        found += [capacity(), len(runs), [given["num_tokens"] for given in runs]]
    del manager.initialize_runtime
    assert vars(manager).keys() == before.keys()
    assert all(vars(manager)[name] is before[name] for name in before)
    others = {"hidden_dim": 2 * HIDDEN, "dtype": torch.float32}
    (other,) = dispatcher.get_pipeline_runtime_initializers(**others)
    assert other.resource_key == initializer.resource_key != other.signature
    with pytest.raises(RuntimeError, match="incompatible signature"):
        other.prepare(num_tokens=1, device=device)
    with pytest.raises(ValueError, match="positive token capacity, got 0"):
        initializer.prepare(num_tokens=0, device=device)
    for wrong in ({"num_tokens": 0}, {"hidden_dim": 0}):
        with pytest.raises(ValueError, match="must be positive, got 0"):
            manager.initialize_runtime(**{"num_tokens": 1, **sizes, "device": device, **wrong})
    with pytest.raises(TypeError, match="must be floating point, got torch.int64"):
        manager.initialize_runtime(num_tokens=1, hidden_dim=1, dtype=torch.int64, device=device)
    fused_a2a.reset_hybrid_ep_buffer()
    return found


@pytest.mark.parametrize("whose", automodel.WHOSE)
@pytest.mark.parametrize("settings", [{}, {"moe_hybridep_compact_routing": True}])
def test_a_pipeline_prepares_its_buffer(ranks, whose, settings):
    for found in ranks(prepared, 2, whose, settings):
        assert found == [640, 1, 704, 2, [640, 704]]


def forgotten(rank, num_ranks, group):
    """All ranks prepare if one has forgotten what it prepared before."""
    fused_a2a, module = automodel.modules("weft")
    fused_a2a.reset_hybrid_ep_buffer()
    dispatcher = manager_of(module, group, moe_flex_dispatcher_backend="hybridep")
    sizes = {"hidden_dim": HIDDEN, "dtype": torch.float32}
    (initializer,) = dispatcher.get_pipeline_runtime_initializers(**sizes)
    manager = dispatcher._comm_manager
    runs, run = [], manager.initialize_runtime
    manager.initialize_runtime = lambda **given: (runs.append(given), run(**given))
    with automodel.without_gpu():
        initializer.prepare(num_tokens=5, device=device_of(rank))
        if rank == 1:
            fused_a2a._hybrid_ep_initialized_capacity = 0
        initializer.prepare(num_tokens=5, device=device_of(rank))
        if rank == 1:
            fused_a2a._hybrid_ep_runtime_signature = ("another",)
        with pytest.raises(RuntimeError, match="another rank refused|incompatible signature"):
            initializer.prepare(num_tokens=5, device=device_of(rank))
    fused_a2a.reset_hybrid_ep_buffer()
    return len(runs)


def test_all_ranks_prepare_if_one_has_to(ranks):
    assert ranks(forgotten, 2) == [2, 2]


def failed(rank, num_ranks, group, whose):
    fused_a2a, module = automodel.modules(whose)
    fused_a2a.reset_hybrid_ep_buffer()
    dispatcher = manager_of(module, group, moe_flex_dispatcher_backend="hybridep")
    manager = dispatcher._comm_manager
    sizes = {"hidden_dim": HIDDEN, "dtype": torch.float32}
    (initializer,) = dispatcher.get_pipeline_runtime_initializers(**sizes)
    manager.token_probs = kept = torch.ones(2)
    manager.combine = lambda *given: 1 / 0
    with automodel.without_gpu(), pytest.raises(ZeroDivisionError):
        initializer.prepare(num_tokens=5, device=device_of(rank))
    assert manager.token_probs is kept and manager.handle is None
    assert fused_a2a._hybrid_ep_initialized_capacity == 0


@pytest.mark.parametrize("whose", automodel.WHOSE)
def test_a_failed_preparation_leaves_no_trace(ranks, whose):
    ranks(failed, 2, whose)


@pytest.mark.parametrize("chunk", ["64", "96", "0", "7"])
def test_sizes_and_signatures_are_automodels(monkeypatch, chunk):
    monkeypatch.setenv("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", chunk)
    _, theirs = automodel.modules("automodel")
    _, ours = automodel.modules("weft")
    manager = ours._HybridEPManager(object(), 2, 8, 2, moe_hybridep_num_blocks_permute=5)
    made = [
        module.HybridEPPipelineRuntimeInitializer(manager, 128, torch.bfloat16)
        for module in (theirs, ours)
    ]
    assert made[0].signature == made[1].signature
    for num_tokens in (1, 16, 511, 512, 513, 1000, 4096, 4097):
        wanted, found = (one.required_capacity(num_tokens) for one in made)
        assert found == wanted
