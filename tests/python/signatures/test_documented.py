# SPDX-License-Identifier: Apache-2.0
"""Signatures of DeepEP 2.5, UltraEP and MoonEP as they are documented: PyPI has none of them."""

import ast

import compare
import pytest
import torch

from weft.compat import deep_ep, moonep, ultra_ep
from weft.compat.deep_ep import comm, utils

WHOLE = """
class EPBuffer:
    def __init__(self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
                 use_fp8_dispatch=False, lb_allocation_plan_or_num_bytes=0, deterministic=False,
                 allow_hybrid_mode=True, allow_multiple_reduction=True,
                 prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0,
                 num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False): ...
    def dispatch(self, x, topk_idx=None, topk_weights=None,
                 cumulative_local_expert_recv_stats=None, num_experts=None,
                 num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0,
                 previous_event=None, async_with_compute_stream=False,
                 allocate_on_comm_stream=False, handle=None, do_handle_copy=False,
                 do_cpu_sync=None, do_expand=False, do_zero_padding=False,
                 use_tma_aligned_col_major_sf=False, defer_epilogue=False): ...
    def combine(self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0,
                previous_event=None, async_with_compute_stream=False,
                allocate_on_comm_stream=False, defer_epilogue=False): ...
    @staticmethod
    def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk=0,
                             use_fp8_dispatch=False, allow_hybrid_mode=True,
                             allow_multiple_reduction=True): ...
    def get_theoretical_num_sms(self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0,
                                nvlink_gbs=0, sm_read_gbs=0, sm_write_gbs=0): ...
    def get_theoretical_num_qps(self, num_sms): ...
    def barrier(self, wait_comm_stream=True, with_cpu_sync=False, sequential=True,
                context_idx=None): ...
    def get_comm_stream(self): ...
    def get_physical_domain_size(self): ...
    def get_logical_domain_size(self): ...
    def print_memory_usage(self): ...
    def destroy(self): ...
    @staticmethod
    def capture(): ...
    def lb_prefetch_weights(self, redundant_expert_weights, expert_weights, redundancy_mapping,
                            num_sms=0, previous_event=None): ...
    def lb_reduce_grads(self, redundant_expert_grads, expert_grads, redundancy_mapping,
                        num_sms=0, previous_event=None): ...
    def lb_get_theoretical_num_sms(self): ...
class EventOverlap:
    def __init__(self, event=None, extra_tensors=None): ...
    def current_stream_wait(self, release_handle=False): ...
    def wait(self): ...
    def register_hook_after_wait(self, fn): ...
    def __call__(self, release_handle=False): ...
class BufferAllocator:
    def __init__(self): ...
    def allocate(self, shape, dtype): ...
    def materialize(self, storage): ...
class EPHandle:
    def __init__(self, do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms,
                 topk_idx, num_recv_tokens, num_expanded_tokens, num_recv_tokens_per_expert_list,
                 psum_num_recv_tokens_per_scaleup_rank, psum_num_recv_tokens_per_expert,
                 num_unaligned_recv_tokens_per_expert, recv_src_metadata, dst_buffer_slot_idx,
                 token_metadata_at_forward, channel_linked_list): ...
def destroy_all_managed_nccl_comm(): ...
def get_num_allocation_alignment(): ...
def get_num_rdma_alignment(): ...
def get_num_tma_alignment(): ...
"""
COMM = """
class NCCLCommHandle:
    def __init__(self, nccl_comm, managed): ...
    def get(self): ...
def barrier(
    buffer, wait_comm_stream=True, with_cpu_sync=False, sequential=True, context_idx=None
): ...
def get_comm_stream(buffer): ...
def get_nccl_comm_handle(group, force_new_comm=False): ...
def destroy_all_managed_nccl_comm(): ...
def get_physical_domain_size(group_or_buffer): ...
def get_logical_domain_size(group_or_buffer, allow_hybrid_mode=None): ...
"""
ENVS = """
def get_physical_domain_size(group): ...
def get_logical_domain_size(group, allow_hybrid_mode=True): ...
def get_nvlink_gbs(factor=0.9): ...
"""
ULTRA_EP = """
class Manager:
    def __init__(self, group, num_layers, num_local_master_experts, num_local_redundant_experts,
                 expert_fc1_numel, expert_fc2_numel, is_train=True, explicitly_destroy=False,
                 max_microbatches=1, legacy_placement=False): ...
    def update_placement(self, layer, routing_map): ...
    def reroute(self, layer, probs, routing_map): ...
    def reroute_sparse(self, layer, topk_ids): ...
    def weight_sync(self, layer, previous_event=None, async_finish=False): ...
    def construct_local_master_ptr_pool(self, layer, fc1_weights, fc2_weights, fc1_grads,
                                        fc2_grads): ...
    def allocate_microbatch_slot(self, layer): ...
"""
MOONEP = """
class Buffer:
    def __init__(self, S, H, K, E, num_ep_ranks, num_sms, token_padding, B, group,
                 explicitly_destroy): ...
    def dispatch(self, x, weights, ids, counts): ...
    def prefetch_weight(self, *, plan, full_gate_weight, full_up_weight, full_down_weight): ...
    def combine(self, *, plan, hidden_nvsh, route_weights_nvs=None): ...
    def destroy(self): ...
"""
NAMES = {
    deep_ep: "EPBuffer EPHandle EventOverlap EventHandle BufferAllocator BufferBase EngramBuffer "
    "PPBuffer BucketBuffer BucketSession comm topk_idx_t get_physical_domain_size "
    "get_logical_domain_size Buffer ElasticBuffer HybridEPBuffer",
    comm: "barrier",
    utils.envs: "init_dist init_seed dist_print check_nvlink_connections check_torch_deterministic "
    "get_sm_read_gbs get_sm_write_gbs get_rdma_gbs check_fast_rdma_atomic_support EnvOverride",
    utils.math: "align ceil_div calc_diff safe_div per_token_cast_to_fp8 per_token_cast_back "
    "hash_tensor hash_tensors count_bytes inplace_unique create_grouped_scores",
    utils.semantic: "value_or weak_lru",
}
HANDLE = (
    "topk_idx num_recv_tokens num_expanded_tokens num_recv_tokens_per_expert_list "
    "psum_num_recv_tokens_per_scaleup_rank psum_num_recv_tokens_per_expert "
    "num_unaligned_recv_tokens_per_expert recv_src_metadata dst_buffer_slot_idx "
    "token_metadata_at_forward channel_linked_list do_expand num_experts expert_alignment "
    "num_max_tokens_per_rank num_sms"
)
BUFFER = (
    "group rank_idx num_ranks allow_hybrid_mode allow_multiple_reduction "
    "prefer_overlap_with_compute deterministic nccl_comm_handle num_bytes num_lb_bytes "
    "num_max_tokens_per_rank num_allocated_qps runtime context num_scaleout_ranks "
    "num_scaleup_ranks scaleout_rank_idx scaleup_rank_idx num_rdma_ranks num_nvlink_ranks "
    "explicitly_destroy main_context"
)


@pytest.mark.parametrize(
    "text, module, allowed",
    [
        (WHOLE, deep_ep, {"EPHandle.__init__"}),
        (COMM, comm, set()),
        (ENVS, utils.envs, set()),
        (ULTRA_EP, ultra_ep, set()),
        (MOONEP, moonep, set()),
    ],
)
def test_signatures_are_the_documented_ones(text, module, allowed):
    found = list(compare.compare(text, module, is_whole=True))
    # The hook is given by place.
    found = [one for one in found if one[0] != "EventOverlap.register_hook_after_wait"]
    assert {name for name, _ in found} == allowed, found


def test_places_are_the_documented_ones():
    """One after another, so that nothing stands between them."""
    (wanted, *_) = [node for node in ast.parse(WHOLE).body if isinstance(node, ast.ClassDef)]
    for node in wanted.body:
        static = compare._find(deep_ep, f"EPBuffer.{node.name}")
        ours = compare.of_weft(static, not isinstance(static, staticmethod))
        given = [one.arg for one in node.args.args if one.arg != "self"]
        assert [one.name for one in ours.positional] == given, node.name


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module):
    for name in NAMES[module].split():
        assert hasattr(module, name), name
        assert name in module.__all__, name


def attributes(rank, num_ranks, group):
    buffer = deep_ep.EPBuffer(group, None, 4, 8)
    x, idx = torch.ones(2, 8, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    handle = buffer.dispatch(x, idx, num_experts=2)[3]
    missing = [name for name in HANDLE.split() if not hasattr(handle, name)]
    return missing + [name for name in BUFFER.split() if not hasattr(buffer, name)]


def test_attributes_are_there(ranks):
    assert ranks(attributes, 1) == [[]]
