# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face's Transformers whose experts are spread over ranks, with Weft between
them, against the same models in one piece: logits, gradients, what is generated, trained, saved."""

import gc
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from packages import HUGGING_FACE, ROOT
from ranks import Ranks

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Of small models, by the name of their kind.
CONFIGS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

if not HUGGING_FACE.exists():
    pytest.skip(f"no {HUGGING_FACE} (scripts/python makes it)", allow_module_level=True)


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that other tests do not use: they would find packages that are not there for them."""
    pool = Ranks()
    yield pool
    pool.stop()


def find_packages():
    if str(HUGGING_FACE) not in sys.path:
        sys.path.append(str(HUGGING_FACE))


def models(rank, kind, folder, implementation="weft", experts=None, **sizes):
    """The model in one piece, and spread over the ranks. experts: what computes them in both."""
    find_packages()
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import weft.transformers

    weft.transformers.register()
    if rank == 0:
        torch.manual_seed(7)
        config = AutoConfig.for_model(kind, **{**SIZES, **CONFIGS[kind]})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    spread = DistributedConfig(**sizes, ep_implementation=implementation)
    given = {} if experts is None else {"experts_implementation": experts}
    return (
        AutoModelForCausalLM.from_pretrained(folder, **given),
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread, **given),
    )


def tokens(rank, length):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gradients(whole_model, model, num_ranks):
    """FSDP gives the mean of the ranks' gradients."""
    found = dict(model.named_parameters())
    for name, parameter in whole_model.named_parameters():
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(want)
        got = found[name].grad
        got = torch.zeros_like(want) if got is None else whole(got)
        torch.testing.assert_close(got, want / num_ranks, rtol=1e-4, atol=1e-6, msg=name)


def is_as_in_one_piece(rank, num_ranks, group, kind, folder, recomputes, experts=None):
    sizes = {"fsdp_size": num_ranks, "ep_size": num_ranks}
    one, model = models(rank, kind, folder, experts=experts, **sizes)
    if recomputes:
        model.gradient_checkpointing_enable()
    for each in (one, model):
        each.train()
    ids = tokens(rank, 5 + 6 * rank)
    want, got = (each(input_ids=ids, labels=ids, use_cache=False) for each in (one, model))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    want.loss.backward()
    got.loss.backward()
    check_gradients(one, model, num_ranks)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_gradients(own_ranks, kind, recomputes, tmp_path):
    own_ranks(is_as_in_one_piece, 2, kind, str(tmp_path), recomputes)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_other_computations_of_experts(own_ranks, experts, tmp_path):
    own_ranks(is_as_in_one_piece, 2, "qwen3_moe", str(tmp_path), False, experts)


def made_experts(implementation, device="cpu"):
    """The experts of a layer, two on each rank, and the class that spreads them."""
    find_packages()
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from weft.transformers import WeftEP

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(num_experts=2, experts_implementation=implementation, **sizes)
    experts = Qwen3MoeExperts(config).to(device)
    experts._is_expert_parallel = True
    return experts, WeftEP


def meshes(num_ranks):
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("ep", "tp"))
    return mesh["ep"], mesh["tp"]


def one_rank_gets_all(rank, num_ranks, group, num_tokens, experts, device):
    """Rank 0 has the experts of all tokens, and the last rank has no tokens."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(3)
    (own, spread), (of_all, _) = made_experts(experts, device), made_experts(experts, device)
    of_all._is_expert_parallel = False
    for parameter, same in zip(own.parameters(), of_all.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)  # the same on all ranks, of which one computes
        same.data.copy_(parameter)
    layer = spread(own, *meshes(num_ranks))
    count = 0 if rank == num_ranks - 1 else num_tokens
    given = torch.randn(num_tokens, 64)[:count], torch.rand(num_tokens, 2)[:count]
    x, weights = (tensor.to(device).requires_grad_() for tensor in given)
    dense = (tensor.detach().to(device, copy=True).requires_grad_() for tensor in given)
    dense_x, dense_weights = dense
    choices = torch.tensor([[0, 1]], device=device).expand(count, 2)
    out = layer(x, choices, weights)
    out.square().sum().backward()
    if count > 0:
        dense = of_all(dense_x, choices, dense_weights)
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
        dense.square().sum().backward()
        torch.testing.assert_close(x.grad, dense_x.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights.grad, dense_weights.grad, rtol=1e-4, atol=1e-5)
    for parameter, same in zip(own.parameters(), of_all.parameters()):
        want = torch.zeros_like(parameter) if same.grad is None else same.grad
        dist.all_reduce(want)
        want = want if rank == 0 else torch.zeros_like(want)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_rank_without_rows_and_one_without_tokens(own_ranks, num_tokens, experts, device):
    own_ranks(one_rank_gets_all, 2, num_tokens, experts, device)


def forgets_a_layer(rank, num_ranks, group):
    """Python sees at different times on the ranks that nothing uses a layer any longer."""
    experts, spread = made_experts("eager")
    both = meshes(num_ranks)
    x, choices, weights = torch.randn(5, 64), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    first = spread(experts, *both)
    first(x, choices, weights)
    if rank == 0:
        del first
        gc.collect()
    spread(experts, *both)(x, choices, weights)


def test_ranks_that_let_go_of_a_layer_at_different_times(own_ranks):
    own_ranks(forgets_a_layer, 2, seconds=20)


def shares_a_batch(rank, num_ranks, group, folder):
    """Both ranks have the same tokens, of which each sends its part."""
    one, model = models(rank, "qwen3_moe", folder, tp_size=num_ranks, ep_size=num_ranks)
    ids = tokens(0, 7)[:1]  # which two ranks cannot share equally
    want, got = (each(input_ids=ids, labels=ids) for each in (one, model))
    torch.testing.assert_close(whole(got.logits), want.logits, rtol=1e-4, atol=1e-5)
    want.loss.backward()
    got.loss.backward()
    for ours, theirs in zip(model.model.layers, one.model.layers):
        grad = whole(ours.mlp.experts.down_proj.grad)
        torch.testing.assert_close(grad, theirs.mlp.experts.down_proj.grad, rtol=1e-4, atol=1e-6)


def test_ranks_with_the_same_tokens(own_ranks, tmp_path):
    own_ranks(shares_a_batch, 2, str(tmp_path))


def lives(rank, num_ranks, group, folder):
    """Generates, is trained, saved, and loaded in one piece."""
    from_transformers = {}
    for implementation in ("all_to_all", "weft"):
        sizes = {"fsdp_size": num_ranks, "ep_size": num_ranks}
        one, model = models(rank, "qwen3_moe", f"{folder}/first", implementation, **sizes)
        ids = tokens(rank, 4 + 3 * rank)
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), one.generate(ids, **options))
        from_transformers[implementation] = trained(rank, model, folder)
    theirs, losses = from_transformers.values()
    assert losses == pytest.approx(theirs, rel=1e-5) and losses[-1] < losses[0]
    model.save_pretrained(f"{folder}/trained")
    dist.barrier()
    again = type(one).from_pretrained(f"{folder}/trained")
    got = model.eval()(input_ids=ids).logits
    torch.testing.assert_close(got, again(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert (got - one(input_ids=ids).logits).abs().max() > 1e-3


def trained(rank, model, folder):
    """The losses of some steps of Transformers' trainer."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for ids in tokens(99, 8).repeat(12, 1)]
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer",
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_life(own_ranks, tmp_path):
    own_ranks(lives, 2, str(tmp_path), seconds=180)


def on_two_ranks(*words):
    """Returns what a program prints below torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(HUGGING_FACE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr  # as the interpreter ends
    return done.stdout


def test_the_page_runs(tmp_path):
    (body,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/transformers.md").read_text(), re.S)
    script = tmp_path / "spread.py"
    script.write_text(body)
    assert on_two_ranks(script, tmp_path / "model").count("tensor([[") == 2


def test_the_benchmark(tmp_path):
    path = tmp_path / "steps.json"
    words = ["--device", "cpu", "--steps", "2", "--warmup", "1", "--json", path]
    on_two_ranks(ROOT / "bench/transformers_bench.py", *words)
    own, ours = json.loads(path.read_text())["rows"]
    assert (own["mode"], ours["mode"]) == ("all_to_all", "weft")
    assert own["losses"] == pytest.approx(ours["losses"], rel=1e-2) and len(own["losses"]) == 3
    assert own["seconds"] > 0 and ours["ratio"] > 0


def test_what_is_missing_is_said():
    code = "import weft.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "weft.transformers needs transformers 5.23 or later (No module named" in done.stderr
