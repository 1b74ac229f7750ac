# SPDX-License-Identifier: Apache-2.0
"""Code of GPUs inside a shared library: all but that of one architecture becomes zeros, which
compress to nothing. Sizes and headers stay, so that CUDA steps over what is not there."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEAD = struct.Struct("<IHHQ")  # magic, version, size of this head, bytes that follow it
MAGIC, VERSION = 0xBA55ED50, 1
PART = struct.Struct("<HHIQ12xI")  # kind, version, size of the part's head, its bytes, architecture
PTX, MACHINE_CODE = 1, 2


class Part(NamedTuple):
    kind: int
    architecture: int
    begin: int
    end: int


def fat_binaries(data: bytes) -> Iterator[list[Part]]:
    """The parts of each. The magic alone may also be a constant of code, which has another head."""
    at = 0
    while (at := data.find(struct.pack("<IHH", MAGIC, VERSION, HEAD.size), at)) >= 0:
        end = at + HEAD.size + HEAD.unpack_from(data, at)[3]
        at += HEAD.size
        parts = []
        while at + PART.size <= min(end, len(data)):
            kind, _, head, size, architecture = PART.unpack_from(data, at)
            parts.append(Part(kind, architecture, at + head, at + head + size))
            at += head + size
        if at != end:
            raise ValueError(f"a fat binary ends at {end}, its last part at {at}")
        yield parts


def needed(parts: list[Part], architecture: int) -> list[Part]:
    """Machine code for the architecture; without any the newest PTX that it can be made from."""
    code = [one for one in parts if (one.kind, one.architecture) == (MACHINE_CODE, architecture)]
    ptx = [one for one in parts if one.kind == PTX and one.architecture <= architecture]
    return code or sorted(ptx, key=lambda one: one.architecture)[-1:]


def trim(library: Path, architecture: int) -> int:
    """How many bytes became zeros."""
    data = bytearray(library.read_bytes())
    num_bytes = 0
    for parts in fat_binaries(data):
        kept = needed(parts, architecture)
        for part in parts:
            if part not in kept:
                data[part.begin : part.end] = bytes(part.end - part.begin)
                num_bytes += part.end - part.begin
    if num_bytes:
        library.write_bytes(data)
    return num_bytes
