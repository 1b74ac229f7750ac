# SPDX-License-Identifier: Apache-2.0
"""SGLang's own low-latency dispatcher with single-batch overlap, over Weft on two ranks, on GPUs
also on one.

Its `compute_overlap_args` makes the signals and says what combine is given. The down projection is
a thread of this file, which begins when combine has; on GPUs it is kernels on the current stream,
while combine is on SGLang's other one. It signals as DeepGEMM does on Hopper, by block of rows, or
as FlashInfer does on Blackwell, by expert. What is not to be read is NaN.
"""

import threading
import time
from functools import partial

import pytest
import sglang_stubs
import torch
from dense import Layer, plain
from sglang_stubs import DeepEPMode, TopK, dispatchers, make

from packages import wheel
from weft import block_formats

HIDDEN = 256
NUM_MAX = 96  # tokens of a rank: an expert's block has as many rows from each, up to three signals
TOKENS = [(90, 37), (60, 0)]  # of the ranks
STEP = 0.002  # seconds between two signals
CYCLES = 2_000_000  # of a GPU, about half as long
TILES = 5  # that make a block of rows whole on Hopper
TOLERANCE = {"BF16": 0.05, "FP8": 0.3, "NVFP4": 1.0}
SCALE = torch.tensor(448 * 6 / 8.0)  # of NVFP4


@pytest.fixture(scope="module")
def package():
    return wheel(sglang_stubs.PACKAGE)


class Overlap:
    """Hooks that SGLang's models hang into the dispatcher around one layer."""

    def __init__(self, module, dispatcher):
        self.module, self.dispatcher = module, dispatcher
        self.hooks = [
            dispatcher.register_post_dispatch_hook(self._after_dispatch),
            dispatcher.register_pre_combine_hook(self._before_combine),
            dispatcher.register_post_combine_hook(self._after_combine),
        ]

    def _after_dispatch(self, dispatcher, output):
        other = torch.cuda.Stream()
        self.combine, self.down, self.shared = self.module.compute_overlap_args(output, other)
        dispatcher.set_overlap_args(
            combine_overlap_args=self.combine, meta_overlap_args=self.shared
        )

    def _before_combine(self, dispatcher, given):
        if "record_event_after_down" in self.shared:
            self.shared["record_event_after_down"].record()

    def _after_combine(self, dispatcher, out):
        dispatcher.clear_overlap_args()

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def rows_of(out, num_local):
    """bf16 [El, R * NUM_MAX, H]: the dispatched rows."""
    rows, scales = out.hidden_states, out.hidden_states_scale
    if rows.size(0) == num_local:
        return plain(rows, scales)
    tiles = scales.permute(5, 2, 4, 0, 1, 3).view(torch.uint8)
    scales = block_formats.from_tiles(tiles, rows.size(0)).view(torch.float8_e4m3fn)
    return block_formats.from_nvfp4(rows.permute(2, 0, 1), scales, SCALE).to(torch.bfloat16)


class Kernels:
    """A stand-in for a thread: start() gives all of `target` to the current stream."""

    def __init__(self, target):
        self.start = target

    def join(self):
        pass


def writer_of(overlap, steps):
    """Returns a thread, or `Kernels` on a GPU, that goes through the generator `steps`, with a
    pause wherever it yields."""
    is_on_gpu = overlap.down.signal.is_cuda

    def write():
        assert is_on_gpu or overlap.down.start_event.awaited.wait(30)
        for _ in steps:
            torch.cuda._sleep(CYCLES) if is_on_gpu else time.sleep(STEP)

    return Kernels(write) if is_on_gpu else threading.Thread(target=write)


def down_by_block(overlap, made, counts, block):
    """DeepGEMM's masked product: returns its rows, which are not there yet, and who writes them."""
    late, signal = torch.full_like(made, float("nan")), overlap.down.signal
    num_blocks = -(-made.size(1) // block)
    overlap.down.start_event.record()

    def steps():
        for expert, count in enumerate(counts.tolist()):
            for place in range(-(-count // block)):
                own = slice(place * block, min((place + 1) * block, count))
                mark = expert * num_blocks + place
                signal[mark] = TILES - 1
                yield
                late[expert, own] = made[expert, own]
                signal[mark] = TILES

    overlap.shared |= {"block_m": block, "threshold": TILES}
    return late, writer_of(overlap, steps())


def down_by_expert(overlap, made, counts):
    """FlashInfer's masked product, each of whose multiprocessors signals every expert."""
    late, signal = torch.full_like(made, float("nan")), overlap.down.signal.view(torch.int32)
    overlap.down.start_event.record()

    def steps():
        for expert, count in enumerate(counts.tolist()):
            signal[expert] = overlap.down.num_sms - 1
            yield
            late[expert, :count] = made[expert, :count]
            signal[expert] += 1

    return late, writer_of(overlap, steps())


def down(overlap, block, made, counts):
    if block:
        return down_by_block(overlap, made, counts, block)
    return down_by_expert(overlap, made, counts)


def decode(layer, module, dispatcher, write=None):
    """A layer's output; write: makes rows from those that the experts have made, and a thread."""
    given = TopK(layer.weights, layer.ids.to(torch.int32))
    out = dispatcher.dispatch(hidden_states=layer.x, topk_output=given)
    made = layer.blocks(rows_of(out, layer.num_local), out.masked_m)
    writer = None
    if write is not None:
        made, writer = write(made, out.masked_m)
        writer.start()
    given = module.DeepEPLLCombineInput(made, out.topk_ids, out.topk_weights)
    found = dispatcher.combine(combine_input=given)
    if writer is not None:
        writer.join()
    return found


def overlapped(rank, num_ranks, group, package, tokens, output, block, has_hook):
    """block: rows of Hopper's blocks, 0 on Blackwell by expert, None there without signals."""
    layer = Layer(rank, group, hidden=HIDDEN, tokens=tokens, num_local=4 // num_ranks)
    choices = {"output": output, "is_prefill": False, "num_max": NUM_MAX}
    choices |= {"is_blackwell": not block}
    choices |= {"runner": "flashinfer_cutedsl" if block == 0 else "deep_gemm"}
    with dispatchers(package, **choices) as (module, _, _, sbo):
        mode = DeepEPMode.LOW_LATENCY
        dispatcher = make(module.DeepEPDispatcher, layer, group, mode, return_recv_hook=has_hook)
        if output == "NVFP4":
            scales = SCALE.repeat(layer.num_local).to(layer.device)
            dispatcher.set_quant_config({"input_global_scale": scales})
        wanted = decode(layer, module, dispatcher)
        layer.check(wanted, TOLERANCE[output])
        for _ in range(2):
            overlap = Overlap(sbo, dispatcher)
            write = None if block is None else partial(down, overlap, block)
            found = decode(layer, module, dispatcher, write)
            assert overlap.combine.overlap == (block is not None)
            overlap.remove()
            assert dispatcher.overlap_args is None
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("output", ["BF16", "FP8"])
@pytest.mark.parametrize("block", [64, 128])
def test_on_hopper_combine_takes_blocks_as_they_come(
    ranks, num_ranks, package, tokens, output, block
):
    ranks(overlapped, num_ranks, package, tokens, output, block, True)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("output", ["BF16", "NVFP4"])
@pytest.mark.parametrize("has_hook", [False, True])
def test_on_blackwell_combine_takes_experts_as_they_come(
    ranks, num_ranks, package, tokens, output, has_hook
):
    ranks(overlapped, num_ranks, package, tokens, output, 0, has_hook)


@pytest.mark.parametrize("has_hook", [False, True])
def test_beside_shared_experts_alone_nothing_is_waited_for(ranks, num_ranks, package, has_hook):
    ranks(overlapped, num_ranks, package, TOKENS[0], "FP8", None, has_hook)
