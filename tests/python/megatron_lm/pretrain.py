# SPDX-License-Identifier: Apache-2.0
"""A pretraining run of Megatron-Core as its own scripts make one: GPT with experts, its schedules,
DistributedDataParallel, distributed optimizer and checkpoints, on made-up text. On CPUs CUDA's
streams and tensors are the host's (host_streams.py); all else is Megatron-Core's own."""

import functools
import sys
from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from host_streams import HostTensors, host_streams
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ranks import device_of

MICRO_BATCHES, BATCH = 2, 2
LENGTHS = (16, 7)  # by rank of data parallelism: tokens of a text
# By micro-batch and that rank: the lengths of texts that are packed one behind the other. Megatron-
# Core's attention cannot do without a token (it reshapes to -1), so that one is the fewest.
PACKED = (((5, 11), (1,)), ((1,), (9, 4, 3)))


class Run(NamedTuple):
    """dispatcher: "alltoall", or a backend of "flex"; shape: fields of over_weft.Shape."""

    dispatcher: str
    settings: dict = {}
    packed: bool = False
    lengths: tuple = LENGTHS
    batch: int = BATCH
    micro_batches: int = MICRO_BATCHES
    shape: dict = {}


class PackedAttention(nn.Module):
    """Attention inside of each of the packed texts, which Megatron-Core leaves to Transformer
    Engine."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, packed_seq_params, **_):
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        texts = zip(*(tensor.transpose(0, 1).split(lengths, 1) for tensor in (query, key, value)))
        found = [scaled_dot_product_attention(*text, is_causal=True) for text in texts]
        return torch.cat(found, 1).transpose(0, 1).flatten(1)


class Trainer:
    def __init__(self, rank, run):
        import over_weft
        from megatron.core import distributed, optimizer, parallel_state, pipeline_parallel
        from megatron.core.transformer.module import Float16Module

        self.run, self.device = run, device_of(rank)
        model = over_weft.make_gpt(
            dist.get_world_size(),
            run.dispatcher,
            over_weft.Shape(**{"length": max(run.lengths)} | run.shape),
            PackedAttention if run.packed else None,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            calculate_per_token_loss=True,
            finalize_model_grads_func=distributed.finalize_model_grads,
            **run.settings,
        ).to(self.device)
        config, self.vocabulary = model.config, model.vocab_size
        sharing = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
        if config.bf16:
            model = Float16Module(config, model)
        self.model = distributed.DistributedDataParallel(config, sharing, model)
        settings = optimizer.OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        )
        self.optimizer = optimizer.get_megatron_optimizer(settings, [self.model])
        self.schedule = pipeline_parallel.get_forward_backward_func()
        self.share = parallel_state.get_data_parallel_rank()
        self.text = torch.Generator().manual_seed(self.share)
        self.length = run.lengths[self.share % len(run.lengths)]

    def texts(self, lengths, batch):
        shape = (batch, sum(lengths) + 1)
        return lengths, torch.randint(self.vocabulary, shape, generator=self.text).to(self.device)

    def batches(self):
        if self.run.packed:
            return [self.texts(by_rank[self.share % len(by_rank)], 1) for by_rank in PACKED]
        return [self.texts((self.length,), self.run.batch) for _ in range(self.run.micro_batches)]

    def forward(self, batches, model, return_schedule_plan=False):
        """Megatron's schedules call this for each micro-batch, with `return_schedule_plan` where
        they weave the forward of one with the backward of another."""
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths, text = next(batches)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        given = {"attention_mask": None, "labels": text[:, 1:].contiguous()}
        if self.run.packed:
            ends = torch.tensor([0, *lengths], dtype=torch.int32, device=self.device).cumsum(0)
            given["packed_seq_params"] = PackedSeqParams("thd", ends.int(), ends.int())
        else:
            shape = (1, 1, *2 * lengths)
            mask = torch.ones(shape, dtype=torch.bool, device=self.device).triu(1)
            given["attention_mask"] = mask
        model = model.build_schedule_plan if return_schedule_plan else model
        losses = model(text[:, :-1].contiguous(), positions.expand(len(text), -1), **given)

        def total(found):
            loss = found.float().sum()
            tokens = torch.tensor(text[:, 1:].numel(), dtype=torch.int32, device=self.device)
            return loss, tokens, {"loss": loss.detach() / tokens.clamp(min=1)}

        return losses, total

    def step(self):
        """-> the losses of the micro-batches, and the norm of the gradients."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self.batches()
        losses = self.schedule(
            forward_step_func=self.forward,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.length,
            micro_batch_size=self.run.batch,
            forward_only=False,
        )
        is_good, norm, _ = self.optimizer.step()
        assert is_good
        return [float(one["loss"]) for one in losses], float(norm)

    def shards(self):
        """The optimizers of torch, each of this rank's shards. Megatron's own format of a
        checkpoint has no place for the steps that these count."""
        return [one.optimizer for one in self.optimizer.chained_optimizers]

    def fp32_shards(self):
        """fp32 shards of weights, which bf16 has beside its own."""
        return [p for one in self.shards() for group in one.param_groups for p in group["params"]]

    def save(self, path):
        states = [one.state_dict() for one in self.shards()]
        shards = [shard.detach() for shard in self.fp32_shards()]
        torch.save([self.model.state_dict(), states, shards, self.text.get_state()], path)

    @torch.no_grad()
    def load(self, path):
        weights, states, shards, text = torch.load(path, weights_only=False)
        self.model.load_state_dict(weights)
        for one, state in zip(self.shards(), states, strict=True):
            one.load_state_dict(state)
        for shard, value in zip(self.fp32_shards(), shards, strict=True):
            shard.copy_(value)
        self.text.set_state(text)


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_RANDOM = "megatron.core.tensor_parallel.random"


def on_host(tensor, as_numpy=False, record_stream=False):
    """Megatron's function of this name, which takes no numbers from where they are already."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def on_this_machine(body):
    """Returns `body` for a process of a rank. Its call takes where to import Megatron-Core from, ""
    for the one that is installed, and hands on the rest."""

    @functools.wraps(body)
    def call(rank, num_ranks, group, folder, *args):
        if folder not in ("", *sys.path):
            sys.path.insert(0, folder)
        import over_weft  # noqa: F401  (before anything of Megatron-Core)
        from megatron import core

        assert core.__file__.startswith(folder)
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
