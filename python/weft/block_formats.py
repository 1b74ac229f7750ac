# SPDX-License-Identifier: Apache-2.0
"""Rows with a byte of scale for each small group, as dispatch makes them of bf16: MXFP8 (E4M3, a
power of two for 32 elements) and NVFP4 (E2M1, an E4M3 number for 16 and one for all), and the
layout in which grouped matrix products want such scales.

The last dimension is a row's; any others may come before."""

import torch
from torch import Tensor

from weft.errors import InvalidArgument
from weft.fp8 import with_standard_floats

MXFP8_GROUP = 32  # elements that share a scale
NVFP4_GROUP = 16
TILE_ROWS = 128  # of a tile of scales, which has four of a row
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1's numbers without sign
_LARGEST_FP4 = _FP4[-1]
_LARGEST_E4M3 = 448.0


@with_standard_floats
def from_e8m0(exponents: Tensor) -> Tensor:
    """Returns float32 of uint8 (exponent + 127): 2^-127 to 2^127; 255 is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()


@with_standard_floats
def from_mxfp8(rows: Tensor, scales: Tensor) -> Tensor:
    """Returns rows (float8_e4m3fn [.., H]) * scales (uint8 [.., H / 32]), float32 [.., H]."""
    groups = rows.float().unflatten(-1, (-1, MXFP8_GROUP))
    return (groups * from_e8m0(scales).unsqueeze(-1)).flatten(-2)


@with_standard_floats
def to_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Turns x [.., H] into float8_e4m3fn [.., H] and uint8 [.., H / 32], bits as in dispatch: a
    scale is the least power of two that brings the largest magnitude to at most 448."""
    groups = x.float().unflatten(-1, (-1, MXFP8_GROUP))
    amax = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax.double() / _LARGEST_E4M3)
    code = (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254)
    code = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, code))
    code = torch.where(amax.isnan(), 255, code).to(torch.uint8)
    factor = torch.where(amax.isnan(), amax.double(), torch.exp2(127.0 - code.double()))
    rows = (groups.double() * factor.unsqueeze(-1)).float().clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    return rows.to(torch.float8_e4m3fn).flatten(-2), code


@with_standard_floats
def from_nvfp4(rows: Tensor, scales: Tensor, global_scale: Tensor | float = 1.0) -> Tensor:
    """Returns number * scale / global_scale, float32 [.., H]. rows uint8 [.., H / 2]; scales
    float8_e4m3fn [.., H / 16] (uint8: exponents + 127)."""
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)], device=rows.device)
    codes = torch.stack((rows & 15, rows >> 4), dim=-1).flatten(-2)
    factors = from_e8m0(scales) if scales.dtype == torch.uint8 else scales.float()
    groups = numbers[codes.int()].unflatten(-1, (-1, NVFP4_GROUP))
    return (groups * (factors / global_scale).unsqueeze(-1)).flatten(-2)


@with_standard_floats
def to_nvfp4(x: Tensor, global_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Turns x [.., H] into uint8 [.., H / 2] and float8_e4m3fn [.., H / 16], bits as in dispatch: a
    scale is global_scale times a sixth of the largest magnitude. Raises InvalidArgument for a
    global_scale not above 0, or not finite; one on a GPU gives NaN scales instead."""
    groups = x.float().unflatten(-1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(-1)
    place = global_scale.device if isinstance(global_scale, Tensor) else "cpu"
    given = torch.as_tensor(global_scale, dtype=torch.float32, device=place).reshape(-1)[0]
    is_good = (given > 0) & given.isfinite()
    if not given.is_cuda and not is_good:
        raise InvalidArgument(f"global_scale = {float(given)} (expected more than 0, and finite)")
    given = given.where(is_good, torch.nan).to(x.device)
    # The divisor is a tensor: by a number torch multiplies by the rounded reciprocal on GPUs.
    wanted = given * (amax / amax.new_full((), _LARGEST_FP4))
    scales = wanted.clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    factor = torch.where(scales.float() == 0, 0.0, given / scales.float())
    values = groups * factor.unsqueeze(-1)
    numbers = torch.tensor(_FP4, device=x.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    magnitude = values.abs()
    codes = torch.bucketize(magnitude, middles)  # the lower one of two that are as near
    is_middle = (magnitude.unsqueeze(-1) == middles).any(-1)
    codes += is_middle & (codes % 2 == 1)  # the even one
    codes = torch.where(values.isnan(), 7, codes + 8 * torch.signbit(values))
    pairs = codes.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def in_tiles(scales: Tensor) -> Tensor:
    """Puts scales of one byte [.., rows, S], S a multiple of 4, in tiles of 128 rows and four
    scales: [.., ceil(rows / 128), S / 4, 32, 4, 4], where row r of a tile lies at [r % 32, r / 32];
    rows behind the last are zero."""
    missing = -scales.size(-2) % TILE_ROWS
    whole = torch.nn.functional.pad(scales.view(torch.uint8), (0, 0, 0, missing))
    tiles = whole.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    return tiles.movedim((-4, -3, -2), (-2, -3, -4)).contiguous().view(scales.dtype)


def from_tiles(tiles: Tensor, num_rows: int) -> Tensor:
    """Reverses `in_tiles`, for the first num_rows rows. tiles: as `in_tiles` returns them."""
    whole = tiles.movedim((-4, -3, -2), (-2, -3, -4)).flatten(-2)
    return whole.flatten(-4, -2)[..., :num_rows, :].contiguous()


def as_tiles(scales: Tensor) -> Tensor:
    """Views one-byte scales [.., rows, S], as dispatch returns them with scale_layout="tile", as
    the tiles of `in_tiles`."""
    rows, cols = scales.shape[-2:]
    return scales.flatten(-2).unflatten(-1, (rows // TILE_ROWS, cols // 4, 32, 4, 4))
