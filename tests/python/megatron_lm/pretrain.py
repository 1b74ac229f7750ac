# SPDX-License-Identifier: Apache-2.0
"""A pretraining run of Megatron-Core as its own scripts make one: GPT with experts, its schedules,
DistributedDataParallel, distributed optimizer and checkpoints, on made-up text. On CPUs CUDA's
streams and tensors are the host's (host_streams.py); all else is Megatron-Core's own."""

import functools
from contextlib import ExitStack, nullcontext
from typing import NamedTuple
from unittest.mock import patch

import torch
from host_streams import HostTensors, host_streams

from ranks import device_of

VOCABULARY, EXPERTS, MICRO_BATCHES = 64, 4, 2
LENGTHS = (16, 7)  # by rank: tokens of a text
BATCH = 2


class Run(NamedTuple):
    """dispatcher: "alltoall", or a backend of "flex"."""

    dispatcher: str
    steps: int = 4
    settings: dict = {}


class Trainer:
    def __init__(self, rank, num_ranks, run):
        import over_weft
        from megatron.core import distributed, optimizer, pipeline_parallel
        from megatron.core.models.gpt import gpt_layer_specs, gpt_model
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.transformer_config import TransformerConfig

        over_weft.forget_buffer_after_call()
        CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # for dropout, of which there is none
        over_weft.initialize_groups(num_ranks)
        flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": run.dispatcher}
        dispatcher = {"moe_token_dispatcher_type": "alltoall"}
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            num_moe_experts=EXPERTS,
            moe_router_topk=2,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            expert_model_parallel_size=num_ranks,
            add_bias_linear=False,
            bias_dropout_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            finalize_model_grads_func=distributed.finalize_model_grads,
            **(dispatcher if run.dispatcher == "alltoall" else flex),
            **run.settings,
        )
        config.bf16 = False  # which some settings ask for, and the tests of them do not
        spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
        torch.manual_seed(5)
        self.device = device_of(rank)
        model = gpt_model.GPTModel(config, spec, VOCABULARY, max(LENGTHS)).to(self.device)
        sharing = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = distributed.DistributedDataParallel(config, sharing, model)
        settings = optimizer.OptimizerConfig(
            optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True
        )
        self.optimizer = optimizer.get_megatron_optimizer(settings, [self.model])
        self.schedule = pipeline_parallel.get_forward_backward_func()
        self.text = torch.Generator().manual_seed(rank)
        self.length = LENGTHS[rank % len(LENGTHS)]

    def forward(self, batches, model, return_schedule_plan=False):
        """Megatron's schedules call this for each micro-batch, with `return_schedule_plan` where
        they weave the forward of one with the backward of another."""
        text = next(batches)
        shape = (1, 1, self.length, self.length)
        mask = torch.ones(shape, dtype=torch.bool, device=self.device).triu(1)
        positions = torch.arange(self.length, device=self.device).expand(BATCH, -1)
        given = (text[:, :-1].contiguous(), positions, mask)
        model = model.build_schedule_plan if return_schedule_plan else model
        losses = model(*given, labels=text[:, 1:].contiguous())

        def mean(found):
            return found.float().mean(), {"loss": found.detach().float().mean()}

        return losses, mean

    def step(self):
        """-> the losses of the micro-batches, and the norm of the gradients."""
        shape = (MICRO_BATCHES, BATCH, self.length + 1)
        texts = torch.randint(VOCABULARY, shape, generator=self.text).to(self.device)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.schedule(
            forward_step_func=self.forward,
            data_iterator=iter(texts),
            model=[self.model],
            num_microbatches=MICRO_BATCHES,
            seq_length=self.length,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        is_good, norm, _ = self.optimizer.step()
        assert is_good
        return [float(one["loss"]) for one in losses], float(norm)

    def shards(self):
        """The optimizers of torch, each of this rank's shards. Megatron's own format of a
        checkpoint has no place for the steps that these count."""
        return [one.optimizer for one in self.optimizer.chained_optimizers]

    def save(self, path):
        states = [one.state_dict() for one in self.shards()]
        torch.save([self.model.state_dict(), states, self.text.get_state()], path)

    @torch.no_grad()
    def load(self, path):
        weights, states, text = torch.load(path, weights_only=False)
        self.model.load_state_dict(weights)
        for one, state in zip(self.shards(), states, strict=True):
            one.load_state_dict(state)
        self.text.set_state(text)


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_RANDOM = "megatron.core.tensor_parallel.random"


def on_host(tensor, as_numpy=False, record_stream=False):
    """Megatron's function of this name, which takes no numbers from where they are already."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def on_this_machine(body):
    """In a process of a rank."""

    @functools.wraps(body)
    def call(rank, num_ranks, group, *args):
        import over_weft  # noqa: F401  (before anything of Megatron-Core)

        with ExitStack() as stack:
            if device_of(rank).type == "cpu":
                stack.enter_context(host_streams())
                stack.enter_context(HostTensors())
                stack.enter_context(patch(f"{_DISPATCHER}.maybe_move_tensor_to_cpu", on_host))
                for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):  # nothing is random
                    stack.enter_context(patch(f"{_RANDOM}.{name}", lambda *_, **__: None))
            else:
                stack.enter_context(torch._dynamo.config.patch(disable=True))
            return body(rank, num_ranks, group, *args)

    return call
