# SPDX-License-Identifier: Apache-2.0
"""Puts what the tests of other programs take from their packages into build/carry, which is then
copied to a machine with a GPU and without a network: wheels with less in them, and the folder
`installed`, which PYTHONPATH must have there.

usage: build/venv/bin/python tests/python/carry.py, after `make consumers`
       build/venv/bin/python tests/python/carry.py --vllm WEFT.whl
The latter puts that wheel and a whole vLLM for GPUs of compute capability 9.0 into
build/carry_vllm, in files below 50 MB that tests/python/vllm_gpu/run.py joins again.
"""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packages import CARRIED, DOWNLOADS, ROOT
from vllm_gpu.fat_binaries import trim

# Folders and files of a package, by "name version" of its wheel.
READ = {
    "vllm 0.33.0": (
        "vllm/distributed/device_communicators/",
        "vllm/model_executor/layers/fused_moe/prepare_finalize/",
    ),
    "sglang 0.5.23": ("sglang/srt/batch_overlap/", "sglang/srt/layers/moe/token_dispatcher/"),
    "megatron-core 0.19.2": ("megatron/",),
}
# By the name of an installed one.
INSTALLED = {
    "megatron-core": ("megatron/",),
    "nemo-automodel": (
        "nemo_automodel/__init__.py",
        "nemo_automodel/package_info.py",
        "nemo_automodel/components/__init__.py",
        "nemo_automodel/components/moe/",
        "nemo_automodel/shared/",
    ),
}

# A whole vLLM: for whose Python it is, where it goes, and what of it runs nowhere or is not used.
FOR = ["--python-version=3.12", "--implementation=cp", "--platform=manylinux2014_x86_64"]
FOR += [f"--platform=manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34)]
FOR += ["--platform=manylinux1_x86_64", "--only-binary=:all:"]
CARRIED_VLLM = ROOT / "build/carry_vllm"
UNUSED = ("vllm-rs", "third_party/deep_gemm", "third_party/fmha_sm100", "_qutlass_C.abi3.so")
UNUSED += ("vllm_flash_attn/_vllm_fa2_C.abi3.so",)
ARCHITECTURE = 90
PIECE_BYTES = 50_000_000


def chosen(files: list[str], wanted: tuple[str, ...]) -> list[str]:
    """The Python files; of a wheel also the folders, without which it cannot be imported from."""
    found = [file for file in files if file.startswith(wanted) and file.endswith((".py", "/"))]
    for start in wanted:
        assert any(file.startswith(start) for file in found), f"{start} is not in the package"
    return found


def split(folder: Path, out: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """A compressed archive in pieces, and the sums of all files in `out`."""
    steps = """tar c --sort=name --mtime=@0 --owner=0 --group=0 -C "$1" . | xz -T2 |
        split -b "$3" -d - "$2/site.tar.xz." && cd "$2" && sha256sum -- * >SHA256SUMS"""
    command = ["bash", "-euo", "pipefail", "-c", steps, "split", folder, out, str(piece_bytes)]
    subprocess.run(command, check=True)


def carry_vllm(weft: Path) -> None:
    if "-cp312-" not in weft.name:
        sys.exit(f"carry: {weft} is not for CPython 3.12 (scripts/wheel makes one)")
    site = CARRIED_VLLM.with_name("carry_vllm_site")
    for folder in (site, CARRIED_VLLM):
        shutil.rmtree(folder, ignore_errors=True)
    CARRIED_VLLM.mkdir(parents=True)
    shutil.copy(weft, CARRIED_VLLM)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *FOR]
    listed = Path(__file__).with_name("requirements-vllm-gpu.txt")
    subprocess.run([*pip, "--target", site, "-r", listed], check=True)
    for name in UNUSED:
        unused = site / "vllm" / name
        shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
    for library in sorted((site / "vllm").rglob("*.so")):
        if num_bytes := trim(library, ARCHITECTURE):
            print(f"carry: {library.name} without {num_bytes / 1e6:.0f} MB of other GPUs' code")
    split(site, CARRIED_VLLM)
    shutil.rmtree(site)
    for path in sorted(CARRIED_VLLM.iterdir()):
        print(f"carry: {path.stat().st_size / 1e6:5.1f} MB {path}")


def main() -> None:
    if sys.argv[1:2] == ["--vllm"]:
        return carry_vllm(Path(sys.argv[2]))
    shutil.rmtree(CARRIED, ignore_errors=True)
    CARRIED.mkdir(parents=True)
    for package, wanted in READ.items():
        name, version = package.split()
        (wheel,) = DOWNLOADS.glob(f"{name.replace('-', '_')}-{version}-*.whl")
        with (
            zipfile.ZipFile(wheel) as whole,
            zipfile.ZipFile(CARRIED / wheel.name, "w", zipfile.ZIP_DEFLATED) as small,
        ):
            for file in chosen(whole.namelist(), wanted):
                small.writestr(file, whole.read(file))
    for name, wanted in INSTALLED.items():
        package = distribution(name)
        for file in chosen([str(path) for path in package.files or ()], wanted):
            target = CARRIED / "installed" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package.locate_file(file), target)
    size = sum(path.stat().st_size for path in CARRIED.rglob("*") if path.is_file())
    print(f"carry: {size / 1e6:.1f} MB in {CARRIED}")


if __name__ == "__main__":
    main()
