# SPDX-License-Identifier: Apache-2.0
"""Rules and texts that both Megatron-LM and Megatron-Bridge have.

A row is the rule's number, the settings that break it, the change that mends them, and the text.
"""

OVERLAP = "overlap_moe_expert_parallel_comm"
NEEDS_TE = "CUDA graph with delay_wgrad_compute requires TE version >= 2.12.0."
NEEDS_FUSION = (
    "CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion to be enabled. "
)

COMMON_RULES = [
    (
        "2",
        {"pipeline_model_parallel_size": 2},
        {"virtual_pipeline_model_parallel_size": 2},
        "If enabling EP A2A overlap, virtual_pipeline_model_parallel_size must be specified when "
        "pipeline_model_parallel_size > 1",
    ),
    (
        "6",
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective"},
        f"disable full recomputation when enabling {OVERLAP}",
    ),
    (
        "7",
        {"recompute_method": "uniform"},
        {"recompute_method": None},
        f"disable recomputation method when enabling {OVERLAP}",
    ),
    (
        "8",
        {"recompute_num_layers": 0},
        {"recompute_num_layers": None},
        f"recompute_num_layers must be None when enabling {OVERLAP}",
    ),
    (
        "9",
        {"recompute_modules": ["core_attn", "moe"]},
        {"recompute_modules": ["core_attn", "moe_act"]},
        f"disable moe in recompute_modules when enabling {OVERLAP}",
    ),
    (
        "11",
        {"moe_shared_expert_overlap": True},
        {"moe_shared_expert_overlap": False},
        f"disable moe_shared_expert_overlap when enabling {OVERLAP}",
    ),
    (
        "12",
        {"mtp_num_layers": 2},
        {"mtp_num_layers": 1},
        f"MTP supports at most one layer when enabling {OVERLAP}.",
    ),
    (
        "12",
        {"mtp_num_layers": -1},
        {"mtp_num_layers": 0},
        f"MTP supports at most one layer when enabling {OVERLAP}.",
    ),
]
