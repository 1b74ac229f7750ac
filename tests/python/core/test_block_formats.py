# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and NVFP4: what dispatch makes of bf16 rows, against torch, and the layouts of scales."""

import pytest
import torch

import weft
from weft import block_formats

HIDDEN = 192
GLOBAL_SCALE = 2688 / 3.0  # for numbers of at most 3


def values(num_tokens, hidden=HIDDEN):
    """bf16 of many magnitudes; in the first rows what formats have rules for."""
    powers = 2.0 ** torch.randint(-20, 20, (num_tokens, hidden // 16)).repeat_interleave(16, 1)
    x = (torch.randn(num_tokens, hidden) * powers).bfloat16()
    x[:1, :64] = 0
    x[:1, 64:128] = 2.0**-133
    x[:1, 128] = float("nan")
    x[1:2, 0] = -float("inf")
    x[1:2, 64] = 448
    x[1:2, 65:128] = 0.0
    x[1:2, 128:] = -0.0
    return x


def stored(x, kind):
    """The rows and scales of `x` by torch, and the options of a call that makes them."""
    if kind == "mxfp8":
        return block_formats.to_mxfp8(x), {"quantise": "mxfp8"}
    scale = None if kind == "nvfp4" else torch.tensor([GLOBAL_SCALE])
    made = block_formats.to_nvfp4(x, 1.0 if scale is None else scale)
    return made, {"quantise": "nvfp4", "global_scale": scale}


KINDS = ["mxfp8", "nvfp4", "nvfp4 scaled"]


def quantised(rank, num_ranks, group, kind, layout):
    num_experts = 4 * num_ranks
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=num_experts, max_tokens=32)
    x = values((17, 5)[rank])
    idx = torch.randint(num_experts, (len(x), 3))
    (rows, scales), options = stored(x, kind)
    plan = ex.plan(idx, layout=layout, pad_multiple=1 if layout == "rank_major" else 8)
    made = ex.dispatch(plan, x, **options)
    expected = ex.dispatch(plan, rows, None, scales)
    assert (made.rows.dtype, made.scales.dtype) == (rows.dtype, scales.dtype)
    assert made.rows.shape[1] == HIDDEN // (2 if kind.startswith("nvfp4") else 1)
    is_row = torch.ones(plan.num_rows, dtype=torch.bool)
    if layout == "expert_strided":
        stride = plan.num_rows // len(plan.rows_per_expert)
        is_row = (torch.arange(stride) < plan.rows_per_expert.unsqueeze(1)).flatten()
    for got, want in ((made.rows, expected.rows), (made.scales, expected.scales)):
        assert torch.equal(got[is_row].view(torch.uint8), want[is_row].view(torch.uint8))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_scales_have_the_bits_of_torch(ranks, kind, layout):
    ranks(quantised, 2, kind, layout)


def laid_out(rank, num_ranks, group, kind, stride):
    """Scales of blocks by column and in tiles, against those by row."""
    num_experts = 3 * num_ranks
    hidden = 256
    ex = weft.Exchange(group, hidden=hidden, num_experts=num_experts, max_tokens=100)
    x = values((100, 60)[rank], hidden)
    idx = torch.randint(num_experts, (len(x), 2))
    options = {"layout": "expert_strided", "expert_stride": stride, **stored(x, kind)[1]}
    _, by_row, _, counts = ex.plan_and_dispatch(idx, x, blocks=True, **options)
    words = by_row.scales.contiguous().view(torch.int32)
    for blocks in (True, False):
        options["blocks"] = blocks
        column = ex.plan_and_dispatch(idx, x, scale_layout="column", **options)[1].scales
        tiles = ex.plan_and_dispatch(idx, x, scale_layout="tile", **options)[1].scales
        whole = -(-stride // 128) * 128
        if blocks:
            assert column.stride()[1:] == (1, stride)
            assert tiles.shape == (3, whole, by_row.scales.size(2))
        else:
            column = column.view(torch.int32).view(3, -1, stride).transpose(1, 2)
            tiles = tiles.view(3, whole, -1)
        tiles = block_formats.from_tiles(block_formats.as_tiles(tiles), stride)
        for expert, count in enumerate(counts.tolist()):
            assert torch.equal(column[expert, :count], words[expert, :count])
            assert torch.equal(tiles[expert, :count].view(torch.int32), words[expert, :count])


@pytest.mark.parametrize("stride", [130, 128])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scales_lie_as_they_are_wanted(ranks, kind, stride):
    ranks(laid_out, 2, kind, stride)


def test_what_is_read_is_near_what_was_there():
    x = (torch.randn(50, HIDDEN) * 2.0 ** torch.randint(-4, 5, (50, 1))).bfloat16()
    amax = x.float().abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
    error = (block_formats.from_mxfp8(*block_formats.to_mxfp8(x)) - x.float()).abs()
    assert (error <= torch.maximum(x.float().abs() / 16, amax / 448 * 2**-9)).all()
    scale = 2688 / x.float().abs().max()
    amax = x.float().abs().unflatten(1, (-1, 16)).amax(2).repeat_interleave(16, 1)
    error = (block_formats.from_nvfp4(*block_formats.to_nvfp4(x, scale), scale) - x.float()).abs()
    assert (error <= amax / 6 * (1 + 0.5)).all()  # half of the widest step, and its scale's error


def test_nothing_is_lost_of_what_the_formats_have():
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.0])
    rows, scales = block_formats.to_nvfp4(numbers.view(1, 16), 4.0)
    assert torch.equal(block_formats.from_nvfp4(rows, scales, 4.0), numbers.view(1, 16))
    assert rows.tolist() == [[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]]
    x = torch.tensor([448.0, -448, 0, 0.015625] * 8).view(1, 32) * 2.0**-7
    rows, scales = block_formats.to_mxfp8(x)
    assert scales.item() == 120
    assert torch.equal(block_formats.from_mxfp8(rows, scales), x)
    powers = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert block_formats.from_e8m0(powers).tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


def test_infinities_and_nans_are_seen():
    x = torch.ones(3, 32)
    x[0, 3], x[1, 3] = float("inf"), float("nan")
    read = block_formats.from_mxfp8(*block_formats.to_mxfp8(x))
    assert read[0, 3] == float("inf") and read[1].isnan().all() and torch.equal(read[2], x[2])
    read = block_formats.from_nvfp4(*block_formats.to_nvfp4(x))
    assert read[0, 3] == 448 * 6 and read[1, :16].isnan().all() and not read[1, 16:].isnan().any()


@pytest.mark.parametrize("num_rows", [1, 128, 130])
def test_tiles_come_back(num_rows):
    scales = torch.randint(256, (2, num_rows, 8), dtype=torch.uint8)
    tiles = block_formats.in_tiles(scales)
    assert tiles.shape == (2, -(-num_rows // 128), 2, 32, 4, 4)
    assert torch.equal(block_formats.from_tiles(tiles, num_rows), scales)
    row, col = num_rows - 1, 5
    at = row % 128
    assert tiles[1, row // 128, col // 4, at % 32, at // 32, col % 4] == scales[1, row, col]


def refused(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=96, num_experts=4)
    x = torch.randn(4, 96).bfloat16()
    idx = torch.randint(4, (4, 2))
    plan = ex.plan(idx)
    with pytest.raises(weft.InvalidArgument, match="quantise = mxfp8 here|= nvfp4 here"):
        ex.dispatch(plan, x, quantise="mxfp8" if rank else "nvfp4")
    with pytest.raises(weft.InvalidArgument, match=r"global_scale is given \(which NVFP4 alone"):
        ex.dispatch(plan, x, quantise="mxfp8", global_scale=torch.ones(1) if rank else None)
    with pytest.raises(weft.InvalidArgument, match="global_scale has dtype int64"):
        ex.dispatch(plan, x, quantise="nvfp4", global_scale=torch.ones(1, dtype=torch.int64))
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        scale = torch.full((1,), bad if rank else 1.0)
        with pytest.raises(weft.InvalidArgument, match=f"global_scale = {bad:g} .expected more"):
            ex.dispatch(plan, x, quantise="nvfp4", global_scale=scale)
        with pytest.raises(weft.InvalidArgument, match=f"global_scale = {bad} .expected more"):
            block_formats.to_nvfp4(x, bad)
    with pytest.raises(weft.InvalidArgument, match="scale_rule = 1 with NVFP4"):
        ex.plan_and_dispatch(idx, x, quantise="nvfp4", scale_rule="clamped")
    with pytest.raises(weft.InvalidArgument, match="scales in tiles, of 6 bytes a row"):
        ex.plan_and_dispatch(idx, x, quantise="nvfp4", layout="expert_strided", scale_layout="tile")
    ex.dispatch(plan, x, quantise="nvfp4")


def test_what_a_format_has_not_is_refused(ranks):
    ranks(refused, 2)
