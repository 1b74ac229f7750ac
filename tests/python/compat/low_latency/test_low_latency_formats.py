# SPDX-License-Identifier: Apache-2.0
"""Formats that low-latency dispatches of `Buffer` give rows on their way: FP8, MXFP8 and NVFP4."""

import functools

import pytest
import torch
from buffer_cases import NUM_MAX, check_handle, expected_rows, gather, low_latency_case

from weft import block_formats, fp8
from weft.compat.deep_ep.utils.math import per_token_cast_to_fp8


def quantised(rank, num_ranks, group, round_scale, use_ue8m0):
    case, buffer = low_latency_case(rank, num_ranks, group, hidden=1024)
    case.x[:1] = 0
    case.all_x = gather(group, case.x)
    (recv, scales), count, handle, _, _ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, round_scale=round_scale, use_ue8m0=use_ue8m0
    )
    check_handle(case, handle, count)
    blocks = (case.local, num_ranks * NUM_MAX)
    assert recv.dtype == torch.float8_e4m3fn and recv.shape == (*blocks, 1024)
    if use_ue8m0:
        assert scales.dtype == torch.int32 and scales.shape == (*blocks, 2)
        assert scales.stride()[1:] == (1, blocks[1])
        exponents = scales.contiguous().view(torch.uint8).int()
        scales = torch.ldexp(torch.ones(()), exponents - 127)
    else:
        assert scales.dtype == torch.float32 and scales.shape == (*blocks, 8)
        assert scales.stride()[1:] == (1, blocks[1])
    for expert in range(case.local):
        rows = expected_rows(case, expert, case.all_x).float().view(-1, 8, 128)
        used = rows.size(0)
        want = rows.abs().amax(2).clamp(min=1e-4) / 448
        if round_scale:
            want = torch.exp2(torch.ceil(torch.log2(want)))
        torch.testing.assert_close(scales[expert, :used], want, rtol=1e-6, atol=0)
        back = recv[expert, :used].float().view(-1, 8, 128) * scales[expert, :used].unsqueeze(2)
        assert not back.isnan().any()
        # e4m3 has three bits of mantissa, and steps of 2**-9 near zero.
        error, step = (back - rows).abs(), scales[expert, :used].unsqueeze(2) * 2**-9
        assert (error <= torch.maximum(rows.abs() / 16, step)).all()
        helper = functools.partial(fp8.to_fp8, round_scale=True)
        codes, stored = (helper if round_scale else per_token_cast_to_fp8)(rows.flatten(1))
        assert torch.equal(recv[expert, :used].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scales[expert, :used], stored)


@pytest.mark.parametrize("round_scale, use_ue8m0", [(False, False), (True, False), (True, True)])
def test_fp8_rows_have_a_scale_for_128_elements(ranks, round_scale, use_ue8m0):
    ranks(quantised, 2, round_scale, use_ue8m0)


def of_mxfp8(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group, hidden=256)
    case.x[:1] = 0
    case.all_x = gather(group, case.x)
    (recv, scales), count, handle, _, _ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, use_mxfp8=True
    )
    check_handle(case, handle, count)
    blocks = (case.local, num_ranks * NUM_MAX)
    assert recv.dtype == torch.float8_e4m3fn and recv.shape == (*blocks, 256)
    assert scales.dtype == torch.int32 and scales.shape == (*blocks, 2)
    assert scales.stride()[1:] == (1, blocks[1])
    exponents = scales.contiguous().view(torch.uint8)
    for expert in range(case.local):
        want = block_formats.to_mxfp8(expected_rows(case, expert, case.all_x))
        used = len(want[0])
        assert torch.equal(recv[expert, :used].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(exponents[expert, :used], want[1])


def test_mxfp8_rows_have_a_scale_for_32_elements(ranks):
    ranks(of_mxfp8, 2)


def of_nvfp4(rank, num_ranks, group, use_ue8m0_for_sf, masks):
    """Rows that vLLM and SGLang give to grouped products: experts outermost, scales in tiles."""
    case, buffer = low_latency_case(rank, num_ranks, group, hidden=192, enable_shrink=masks)
    given = None if use_ue8m0_for_sf else 2688 / torch.full((case.local,), 7.0)  # one for each
    scale = torch.ones(1) if given is None else given[:1]
    without = (num_ranks - 1,) if masks else ()
    if masks:
        buffer.low_latency_update_mask_buffer(num_ranks - 1, True)
        for idx in case.all_idx:
            idx[idx // case.local == num_ranks - 1] = -1
    (recv, tiles), count, handle, _, hook = buffer.low_latency_dispatch(
        case.x,
        case.idx,
        NUM_MAX,
        case.num_experts,
        use_nvfp4=True,
        x_global_scale=given,
        use_ue8m0_for_sf=use_ue8m0_for_sf,
        return_recv_hook=True,
    )
    hook()
    check_handle(case, handle, count, without)
    rows = num_ranks * NUM_MAX
    num_tiles = -(-rows // 128)
    assert recv.dtype == torch.uint8 and recv.shape == (rows, 96, case.local)
    assert tiles.dtype == (torch.int8 if use_ue8m0_for_sf else torch.float8_e4m3fn)
    assert tiles.shape == (32, 4, num_tiles, 4, 3, case.local)
    recv = recv.permute(2, 0, 1)
    assert recv.is_contiguous() and tiles.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    for expert in range(case.local):
        want = expected_rows(case, expert, case.all_x, without)
        found = (
            torch.stack(
                [  # (row, scale) of a tile lies at (row % 32, row / 32, scale % 4)
                    tiles[row % 32, row % 128 // 32, row // 128, :, :, expert].t().flatten()
                    for row in range(len(want))
                ]
            )
            if len(want)
            else tiles.new_zeros((0, 12))
        )
        kept = recv[expert, : len(want)]
        if use_ue8m0_for_sf:
            amax = want.float().abs().unflatten(1, (-1, 16)).amax(2)
            powers = torch.exp2(torch.ceil(torch.log2(amax / 6)))
            found = found.view(torch.uint8)
            assert torch.equal(block_formats.from_e8m0(found), powers)
            read = block_formats.from_nvfp4(kept, found)
            bound = powers.repeat_interleave(16, 1)
        else:
            exact = block_formats.to_nvfp4(want, scale)
            assert torch.equal(kept, exact[0])
            assert torch.equal(found.view(torch.uint8), exact[1].view(torch.uint8))
            read, bound = block_formats.from_nvfp4(kept, found, scale), want.float().abs() / 4 + 0.5
        assert ((read - want.float()).abs() <= bound).all()
    ones = torch.ones((case.local, rows, 192), dtype=torch.bfloat16)
    out, *_ = buffer.low_latency_combine(ones, case.idx, torch.ones_like(case.weights), handle)
    choices = (case.all_idx[rank] >= 0).sum(1) * (rank not in without)
    assert torch.equal(out.float(), choices.float().view(-1, 1).expand_as(out))


@pytest.mark.parametrize("use_ue8m0_for_sf, masks", [(False, False), (True, False), (False, True)])
def test_nvfp4_rows_have_a_scale_for_16_elements(ranks, use_ue8m0_for_sf, masks):
    ranks(of_nvfp4, 2, use_ue8m0_for_sf, masks)
