#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that a wheel, or the module `_core` of one, asks nothing of a machine but libc and Python.

usage: tools/check_wheel.py FILE [--limit-mb MB]
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# libgcc_s unwinds exceptions for all of a process; torch asks for it, too. libcuda is opened by the
# CUDA runtime that is linked in, and libfabric by the transport, where there are such.
SYSTEM = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
# auditwheel copies these into the wheel, by names of its own.
COPIED = re.compile(r"libhwy(-[0-9a-f]+)?\.so\.1(\.[0-9.]+)?$")

EXPORTED = {"PyInit__core", "weft_pool_malloc", "weft_pool_free"}  # python/csrc/exports.map


def output_of(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def faults_of_module(module: Path) -> list[str]:
    """One sentence for each thing that another machine may lack, or find in its way."""
    dynamic = output_of("readelf", "--dynamic", "--wide", str(module))
    needed = {m[1] for line in dynamic if (m := re.search(r"\(NEEDED\).*\[(.*)\]", line))}
    others = sorted(n for n in needed - SYSTEM if not COPIED.match(n))
    faults = [f"{module.name} needs {name}" for name in others]
    exported = {line.split()[-1] for line in output_of("nm", "-D", "--defined-only", str(module))}
    if exported != EXPORTED:
        faults.append(f"{module.name} exports {sorted(exported)[:5]}, not {sorted(EXPORTED)}")
    # What no library promises, by a version, must be Python's; a weak name may be missing.
    for line in output_of("nm", "-D", "--undefined-only", str(module)):
        kind, name = line.split()[-2:]
        if kind == "U" and "@" not in name and not re.match("_?Py", name):
            faults.append(f"{module.name} calls {name}, which no library promises")
    return faults


def faults_of_wheel(wheel: Path, limit_mb: float) -> list[str]:
    faults = []
    size = wheel.stat().st_size / 1e6
    if size > limit_mb:
        faults.append(f"{wheel.name} has {size:.1f} MB, more than {limit_mb:g}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        binaries = [n for n in archive.namelist() if archive.read(n)[:4] == b"\x7fELF"]
        modules = [n for n in binaries if re.fullmatch(r"weft/_core\.[^/]*so", n)]
        others = [n for n in binaries if n not in modules and not COPIED.match(Path(n).name)]
        if len(modules) != 1:
            faults.append(f"{wheel.name} has {len(modules)} modules _core")
        faults += [f"{wheel.name} has code in {name}" for name in others]
        for name in modules:
            faults += faults_of_module(Path(archive.extract(name, folder)))
    print(f"{wheel.name}: {size:.1f} MB")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit-mb", type=float, default=30)
    args = parser.parse_args()
    if args.file.suffix == ".whl":
        faults = faults_of_wheel(args.file, args.limit_mb)
    else:
        faults = faults_of_module(args.file)
    for fault in faults:
        print(f"check_wheel: {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
