# SPDX-License-Identifier: Apache-2.0
"""vLLM's own classes over Weft, on two ranks, on GPUs also on one, against a loop over the
experts."""

import pytest
import torch
import torch.distributed as dist
import vllm_stubs
from dense import Layer
from vllm_stubs import QUANT_CONFIG, Delegate

from packages import wheel
from weft.compat import nixl_ep
from weft.compat.deep_ep import Buffer, ElasticBuffer

NUM_MAX = 16  # tokens of a rank in a call with blocks of fixed size
TOKENS = [(9, 5), (4, 0)]  # of the ranks


@pytest.fixture(scope="module")
def package():
    return wheel(vllm_stubs.PACKAGE)


def prepare(layer, worker, defers, is_async):
    """The five results of the class's first half."""
    given = (layer.x, layer.weights, layer.ids, layer.num_experts, None, False, QUANT_CONFIG)
    if not is_async:
        return worker.prepare(*given, defers)
    receiver = worker.prepare_async(*given, defers)
    if isinstance(receiver, tuple):
        hook, receiver = receiver
        hook()
    return receiver()


def finalize(layer, worker, rows, weights, ids, is_async):
    """This rank's tokens by the class's second half."""
    out = torch.full_like(layer.x, 7.0)
    given = (out, rows, weights, ids, False, Delegate())
    if not is_async:
        worker.finalize(*given)
        return out
    receiver = worker.finalize_async(*given)
    if isinstance(receiver, tuple):
        hook, receiver = receiver
        hook()
    receiver()
    return out


def local_of(layer, ids):
    """-1 for the experts of other ranks."""
    local = ids - layer.first
    return torch.where((ids >= layer.first) & (local < layer.num_local), local, -1)


def high_throughput(rank, num_ranks, group, package, tokens, is_async):
    module, *_ = vllm_stubs.modules(package)
    layer = Layer(rank, group, hidden=256, tokens=tokens)
    buffer = Buffer(
        group=group,
        num_nvl_bytes=1 << 30,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    worker = module.DeepEPHTPrepareAndFinalize(buffer, num_ranks, num_ranks, layer.first)
    for _ in range(2):
        rows, scales, counts, ids, weights = prepare(layer, worker, True, is_async)
        local = local_of(layer, ids)
        assert scales is None
        want = [int((local == one).sum()) for one in range(layer.num_local)]
        assert counts.expert_num_tokens.tolist() == want
        made = layer.by_choice(rows, local)
        layer.check(finalize(layer, worker, made, weights, ids, is_async))
    buffer.destroy()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("is_async", [False, True])
def test_high_throughput(ranks, num_ranks, package, tokens, is_async):
    ranks(high_throughput, num_ranks, package, tokens, is_async)


def sizes_of(layer):
    return {
        "num_max_dispatch_tokens_per_rank": NUM_MAX,
        "hidden": layer.x.size(1),
        "num_ranks": layer.num_ranks,
        "num_experts": layer.num_experts,
    }


def check_blocks(layer, worker, is_async, is_fp8):
    """A class whose rows lie in blocks of fixed size, twice."""
    for _ in range(2):
        rows, _, counts, ids, weights = prepare(layer, worker, False, is_async)
        assert ids is None and weights is None and rows.dtype == torch.bfloat16
        made = layer.blocks(rows, counts.expert_num_tokens)
        out = finalize(layer, worker, made, layer.weights, layer.ids, is_async)
        layer.check(out, 0.3 if is_fp8 else 0.05)


def low_latency(rank, num_ranks, group, package, tokens, is_async, is_fp8):
    _, module, *_ = vllm_stubs.modules(package)
    hidden = module.DeepEPLLPrepareAndFinalize.SUPPORTED_HIDDEN_SIZES[0]
    layer = Layer(rank, group, hidden=hidden, tokens=tokens)
    buffer = Buffer(
        group=group,
        num_nvl_bytes=1 << 30,
        num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(**sizes_of(layer)),
        low_latency_mode=True,
        num_qps_per_rank=layer.num_local,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )
    worker = module.DeepEPLLPrepareAndFinalize(buffer, NUM_MAX, num_ranks, is_fp8)
    check_blocks(layer, worker, is_async, is_fp8)
    buffer.destroy()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_low_latency(ranks, num_ranks, package, tokens, is_async, is_fp8):
    ranks(low_latency, num_ranks, package, tokens, is_async, is_fp8)


def with_nixl(rank, num_ranks, group, package, tokens, is_async, is_fp8, folder):
    *_, module = vllm_stubs.modules(package)
    hidden = module.NixlEPPrepareAndFinalize.SUPPORTED_HIDDEN_SIZES[0]
    layer = Layer(rank, group, hidden=hidden, tokens=tokens)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store)
    buffer.update_memory_buffers(
        num_ranks=num_ranks,
        num_experts_per_rank=layer.num_local,
        num_rdma_bytes=nixl_ep.Buffer.get_rdma_size_hint(**sizes_of(layer)),
    )
    buffer.connect_ranks(list(range(num_ranks)))
    worker = module.NixlEPPrepareAndFinalize(buffer, NUM_MAX, num_ranks, layer.num_experts, is_fp8)
    check_blocks(layer, worker, is_async, is_fp8)
    buffer.set_tcp_store_group(None)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_nixl(ranks, num_ranks, package, tokens, is_async, is_fp8, tmp_path):
    ranks(with_nixl, num_ranks, package, tokens, is_async, is_fp8, str(tmp_path))


def elastic(rank, num_ranks, group, package, tokens, is_async, is_graph):
    _, _, module, _ = vllm_stubs.modules(package)
    layer = Layer(rank, group, hidden=256, tokens=tokens)
    buffer = ElasticBuffer(
        group=group,
        num_max_tokens_per_rank=NUM_MAX,
        hidden=256,
        num_topk=layer.ids.size(1),
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=False,
        allow_multiple_reduction=False,
        explicitly_destroy=True,
    )
    sizes = (layer.first, layer.num_experts, layer.ids.size(1))
    worker = module.DeepEPV2PrepareAndFinalize(
        buffer, num_ranks, num_ranks, *sizes, use_cudagraph=is_graph
    )
    for _ in range(2):
        rows, _, counts, ids, weights = prepare(layer, worker, True, is_async)
        local = local_of(layer, ids)
        if is_graph:
            most = 1 << (max(tokens) - 1).bit_length()
            assert counts.expert_num_tokens is None and len(rows) == num_ranks * most
        else:
            want = [int((local == one).sum()) for one in range(layer.num_local)]
            assert counts.expert_num_tokens.tolist() == want
        made = layer.by_choice(rows, local)
        out = finalize(layer, worker, made, weights.nan_to_num(), ids, is_async)
        layer.check(out)
    buffer.destroy()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_graph", [False, True])
def test_elastic(ranks, num_ranks, package, tokens, is_async, is_graph):
    if is_graph:
        tokens = (max(tokens),) * 2  # vLLM pads the ranks of a graph to one number
    ranks(elastic, num_ranks, package, tokens, is_async, is_graph)
