# SPDX-License-Identifier: Apache-2.0
"""SGLang's own dispatchers over Weft, on two ranks, on GPUs also on one, against a loop over the
experts."""

import pytest
import sglang_stubs
import torch
import torch.distributed as dist
from dense import Layer, plain
from loading import stand_ins
from sglang_stubs import NUM_MAX, DeepEPMode, TopK, dispatchers, make

from packages import wheel
from weft import block_formats

HIDDEN = 256
TOKENS = [(9, 5), (4, 0)]  # of the ranks


@pytest.fixture(scope="module")
def package():
    return wheel(sglang_stubs.PACKAGE)


def prefill(layer, module, dispatcher):
    given = TopK(layer.weights, layer.ids.to(torch.int32))
    out = dispatcher.dispatch(layer.x, given)
    rows = plain(out.hidden_states, out.hidden_states_scale)
    chosen = (out.topk_ids >= 0).sum().item()
    assert all(count % 128 == 0 for count in out.num_recv_tokens_per_expert)
    assert sum(out.num_recv_tokens_per_expert) >= chosen
    made = layer.by_choice(rows, out.topk_ids).float() * out.topk_weights.unsqueeze(2)
    summed = made.sum(1).to(torch.bfloat16)
    given = module.DeepEPNormalCombineInput(summed, out.topk_ids, out.topk_weights)
    return dispatcher.combine(given)


def decode(layer, module, dispatcher):
    given = TopK(layer.weights, layer.ids.to(torch.int32))
    dispatcher.dispatch_a(layer.x, given)
    out = dispatcher.dispatch_b()
    rows = plain(out.hidden_states, out.hidden_states_scale)
    assert rows.shape == (layer.num_local, layer.num_ranks * NUM_MAX, HIDDEN)
    made = layer.blocks(rows, out.masked_m)
    dispatcher.combine_a(module.DeepEPLLCombineInput(made, out.topk_ids, out.topk_weights))
    return dispatcher.combine_b()


def deepep(rank, num_ranks, group, package, tokens, output, is_waiting):
    layer = Layer(rank, group, hidden=HIDDEN, tokens=tokens)
    with dispatchers(package, output=output) as (module, *_):
        options = {"async_finish": is_waiting, "return_recv_hook": is_waiting}
        dispatcher = make(module.DeepEPDispatcher, layer, group, DeepEPMode.AUTO, **options)
        tolerance = 0.05 if output == "BF16" else 0.3
        for is_prefill in (True, False, True, False):
            sglang_stubs.chosen.is_prefill = is_prefill
            call = prefill if is_prefill else decode
            layer.check(call(layer, module, dispatcher), tolerance)
        assert len(sglang_stubs.chosen.buffers) == 1


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("output", ["BF16", "FP8"])
@pytest.mark.parametrize("is_waiting", [False, True])
def test_deepep_prefill_and_decode(ranks, num_ranks, package, tokens, output, is_waiting):
    ranks(deepep, num_ranks, package, tokens, output, is_waiting)


def one_mode(rank, num_ranks, group, package, mode):
    layer = Layer(rank, group, hidden=HIDDEN, tokens=TOKENS[0])
    is_prefill = mode == "normal"
    with dispatchers(package, is_prefill=is_prefill) as (module, *_):
        dispatcher = make(
            module.DeepEPDispatcher, layer, group, DeepEPMode(mode), return_recv_hook=True
        )
        call = prefill if is_prefill else decode
        layer.check(call(layer, module, dispatcher))


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_deepep_in_one_mode(ranks, num_ranks, package, mode):
    ranks(one_mode, num_ranks, package, mode)


def of_nvfp4(rank, num_ranks, group, package, tokens, has_hook):
    """Rows and scales as SGLang hands them to its grouped products."""
    layer = Layer(rank, group, hidden=HIDDEN, tokens=tokens)
    scale = torch.tensor(448 * 6 / 8.0, device=layer.device)
    with dispatchers(package, output="NVFP4", is_prefill=False) as (module, *_):
        mode = DeepEPMode.LOW_LATENCY
        dispatcher = make(module.DeepEPDispatcher, layer, group, mode, return_recv_hook=has_hook)
        dispatcher.set_quant_config({"input_global_scale": scale.repeat(layer.num_local)})
        dispatcher.dispatch_a(layer.x, TopK(layer.weights, layer.ids.to(torch.int32)))
        out = dispatcher.dispatch_b()
        num_rows, half, num_local = out.hidden_states.shape
        assert (num_rows, half, num_local) == (num_ranks * NUM_MAX, HIDDEN // 2, layer.num_local)
        tiles = out.hidden_states_scale.permute(5, 2, 4, 0, 1, 3).view(torch.uint8)
        scales = block_formats.from_tiles(tiles, num_rows).view(torch.float8_e4m3fn)
        rows = block_formats.from_nvfp4(out.hidden_states.permute(2, 0, 1), scales, scale)
        made = layer.blocks(rows.to(torch.bfloat16), out.masked_m)
        dispatcher.combine_a(module.DeepEPLLCombineInput(made, out.topk_ids, out.topk_weights))
        layer.check(dispatcher.combine_b(), 1.0)  # E2M1 has one bit of mantissa


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("has_hook", [False, True])
def test_nvfp4_decode(ranks, num_ranks, package, tokens, has_hook):
    ranks(of_nvfp4, num_ranks, package, tokens, has_hook)


def with_v2(rank, num_ranks, group, package, tokens, is_prefill, expands, output):
    layer = Layer(rank, group, hidden=HIDDEN, tokens=tokens)
    is_fp8 = output == "FP8"
    choices = {"is_prefill": is_prefill, "expands_prefill": expands}
    with dispatchers(package, **choices) as (_, module, *_):
        dispatcher = module.DeepEPv2Dispatcher(
            group,
            layer.ids.size(1),
            layer.num_experts,
            layer.num_local,
            HIDDEN,
            torch.bfloat16,
            is_fp8,
        )
        for _ in range(2):
            out = dispatcher.dispatch(layer.x, TopK(layer.weights, layer.ids))
            rows = plain(out.hidden_states, out.hidden_states_scale)
            assert out.is_expanded == (not is_prefill or expands is None)
            if out.is_expanded:
                made, begin = torch.zeros_like(rows), 0
                for local, end in enumerate(out.psum_num_recv_tokens_per_expert.tolist()):
                    own = slice(begin, end)
                    made[own] = layer.expert(layer.first + local, rows[own])
                    begin = -(-end // out.expert_alignment) * out.expert_alignment
                made = made.float() * out.topk_weights.unsqueeze(1)
            else:
                made = layer.by_choice(rows, out.topk_ids).float()
                made = (made * out.topk_weights.unsqueeze(2)).sum(1)
            used = made.nan_to_num().to(torch.bfloat16)  # rows behind the last one are undefined
            given = module.DeepEPv2CombineInput(used, None)
            layer.check(dispatcher.combine(given), 0.3 if is_fp8 else 0.05)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("output", ["BF16", "FP8"])
@pytest.mark.parametrize("is_prefill, expands", [(True, None), (True, False), (False, None)])
def test_deepep_v2(ranks, num_ranks, package, tokens, is_prefill, expands, output):
    ranks(with_v2, num_ranks, package, tokens, is_prefill, expands, output)


def with_nixl(rank, num_ranks, group, package, tokens, output, has_hook, folder):
    layer = Layer(rank, group, hidden=HIDDEN, tokens=tokens)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with dispatchers(package, output=output, is_prefill=False, store=store) as (_, _, module, _):
        mode = DeepEPMode.LOW_LATENCY
        options = {"return_recv_hook": has_hook}
        dispatcher = make(module.NixlEPDispatcher, layer, group, mode, **options)
        for _ in range(2):
            layer.check(decode(layer, module, dispatcher), 0.05 if output == "BF16" else 0.3)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("output", ["BF16", "FP8"])
@pytest.mark.parametrize("has_hook", [False, True])
def test_nixl(ranks, num_ranks, package, tokens, output, has_hook, tmp_path):
    ranks(with_nixl, num_ranks, package, tokens, output, has_hook, str(tmp_path))


def test_the_page_lists_the_stand_ins():
    assert stand_ins("sglang") == [*sglang_stubs.STUBS]
