# SPDX-License-Identifier: Apache-2.0
"""A plug-in with the parts that vLLM's CPU platform lacks for expert parallelism: collectives of
unequal sizes, the chosen all-to-all manager, experts in plain torch. All else is vLLM's own: its
engines, its modular kernel, its classes over deep_ep. vLLM loads it in each of its processes."""

import torch
import torch.distributed as dist


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and CpuCommunicator.all_gatherv is not _all_gatherv:
        _add_to_communicator(CpuCommunicator)
        _add_experts()


def _all_gatherv(self, given, dim=0, sizes=None):
    if isinstance(given, list):
        return [_all_gatherv(self, one, dim, sizes) for one in given]
    sizes = sizes or [len(given)] * self.world_size
    padded = given.new_zeros(max(sizes), *given.shape[1:])
    padded[: len(given)] = given
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=self.cpu_group)
    return torch.cat([one[:size] for one, size in zip(gathered, sizes)])


def _reduce_scatterv(self, given, dim=0, sizes=None):
    total = given.float()
    dist.all_reduce(total, group=self.cpu_group)
    sizes = sizes or [len(given) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].to(given.dtype).contiguous()


def _add_to_communicator(communicator) -> None:
    from vllm.distributed.device_communicators import all2all

    managers = {
        "deepep_high_throughput": all2all.DeepEPHTAll2AllManager,
        "deepep_low_latency": all2all.DeepEPLLAll2AllManager,
    }
    make = communicator.__init__

    def made(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if self.use_all2all and self.all2all_backend in managers:
            self.all2all_manager = managers[self.all2all_backend](self.cpu_group)

    communicator.__init__ = made
    communicator.all_gatherv = _all_gatherv
    communicator.reduce_scatterv = _reduce_scatterv


def _add_experts() -> None:
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router
    from vllm.utils.import_utils import has_deep_ep
    from vllm.v1.worker import workspace

    if has_deep_ep():  # vLLM imports these where there is a GPU only
        from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll

        all2all_utils.DeepEPHTPrepareAndFinalize = deepep_ht.DeepEPHTPrepareAndFinalize
        all2all_utils.DeepEPLLPrepareAndFinalize = deepep_ll.DeepEPLLPrepareAndFinalize
        all2all_utils.DEEPEP_QUANT_BLOCK_SHAPE = deepep_ll.DEEPEP_QUANT_BLOCK_SHAPE

    def select(moe_config):
        if moe_config.moe_parallel_config.use_batched_activation_format:
            return UnquantizedMoeBackend.BATCHED_TRITON, _experts(is_batched=True)
        return UnquantizedMoeBackend.TRITON, _experts(is_batched=False)

    def topk_softmax(weights, choices, token_expert_indices, logits, renormalize=False):
        best, indices = logits.float().softmax(-1).topk(weights.shape[1])
        # Powers of two: rows are rounded to the same bits before they are weighted and after. The
        # two forms of experts differ in that.
        best = best / best.sum(-1, keepdim=True) if renormalize else best
        weights.copy_(best.log2().round().exp2())
        choices.copy_(indices)
        return weights, choices

    method.select_unquantized_moe_backend = select
    one = method.UnquantizedFusedMoEMethod
    one.forward_cpu = one.forward_native
    fused_topk_router.vllm_topk_softmax = topk_softmax
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))


def _mlp(x, w13, w2):
    """An expert in fp64: rounded to bf16, it does not show how many rows were computed together."""
    gate, up = (x.double() @ w13.double().T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.double().T


def _experts(is_batched: bool):
    from vllm.model_executor.layers.fused_moe import modular_kernel as kernel
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

    class Experts(kernel.FusedMoEExpertsModular):
        @staticmethod
        def activation_format():
            formats = kernel.FusedMoEActivationFormat
            return formats.BatchedExperts if is_batched else formats.Standard

        _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
        _supports_quant_scheme = staticmethod(lambda *_: True)
        _supports_activation = _supports_parallel_config = staticmethod(lambda _: True)

        def workspace_shapes(self, m, n, k, topk, num_experts, num_local, meta, activation):
            if is_batched:
                return (1,), (1,), (num_local, self.max_num_tokens * self.num_dispatchers, k)
            return (1,), (1,), (m, k)

        def finalize_weight_and_reduce_impl(self):
            if is_batched:
                return reduce.TopKWeightAndReduceDelegate()
            return reduce.TopKWeightAndReduceNoOP()

        def apply(
            self,
            *,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            expert_map,
            expert_tokens_meta,
            **_,
        ):
            if is_batched:
                counts = expert_tokens_meta.expert_num_tokens.tolist()
                for expert, count in enumerate(counts):
                    rows = _mlp(hidden_states[expert, :count], w1[expert], w2[expert])
                    output[expert, :count] = rows.to(output.dtype)
                return
            chosen = topk_ids.long()
            local = chosen if expert_map is None else expert_map[chosen].long()
            # Each choice's row is rounded, and then they are added, as vLLM's kernels do.
            made = torch.zeros(*chosen.shape, output.shape[-1])
            for expert in range(len(w1)):
                token, choice = (local == expert).nonzero(as_tuple=True)
                rows = _mlp(hidden_states[token], w1[expert], w2[expert])
                rows *= topk_weights[token, choice, None].double()
                made[token, choice] = rows.to(output.dtype).float()
            output.copy_(made.sum(1))

    return Experts
