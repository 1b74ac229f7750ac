# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-MoE of random weights.

usage: small_model.py FOLDER VOCABULARY LAYERS [EXPERTS TOPK WIDTH DEVICE]
Each expert has its own weights, so that a row that went to a wrong one changes tokens. Routers read
only columns that no layer writes, and there each token has chosen its experts far from any tie: no
difference in rounding sends a row elsewhere."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(folder, vocabulary, num_layers, experts=8, topk=2, inner=128, device="cpu"):
    # 2,048 is the smallest hidden size of vLLM's low-latency classes.
    hidden, heads, head = 2048, 4, 64
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 512,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": topk,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    dice = torch.Generator(device).manual_seed(1)

    def matrix(rows, columns, gain=1.0):
        made = torch.randn(rows, columns, generator=dice, device=device)
        return (made * gain / columns**0.5).bfloat16().cpu()

    def into_residual(columns, gain=1.0):
        made = matrix(hidden, columns, gain)
        made[:experts] = 0
        return made

    def ones(size):
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, hidden**0.5),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": matrix(vocabulary, hidden, 4.0),
    }
    order = torch.rand(vocabulary, experts, generator=dice, device=device).argsort(1).cpu()
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, :experts] = 0
    embedding.scatter_(
        1, order[:, :topk], (1 + torch.arange(topk) / topk).bfloat16().expand(vocabulary, -1)
    )
    for layer in range(num_layers):
        gate = torch.zeros(experts, hidden)
        gate[:, :experts] = 8 * torch.eye(experts).roll(3 * layer, 0)
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
            f"{name}.self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(heads // 2 * head, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(heads // 2 * head, hidden),
            f"{name}.self_attn.o_proj.weight": into_residual(heads * head),
            f"{name}.self_attn.q_norm.weight": ones(head),
            f"{name}.self_attn.k_norm.weight": ones(head),
            f"{name}.mlp.gate.weight": gate.bfloat16(),
        }
        for expert in range(experts):
            own = f"{name}.mlp.experts.{expert}"
            weights |= {
                f"{own}.gate_proj.weight": matrix(inner, hidden),
                f"{own}.up_proj.weight": matrix(inner, hidden),
                f"{own}.down_proj.weight": into_residual(inner, 3.0),
            }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:7]), *sys.argv[7:])
