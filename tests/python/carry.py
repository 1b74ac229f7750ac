# SPDX-License-Identifier: Apache-2.0
"""Puts what the tests of other programs take from their packages into build/carry, which is then
copied to a machine with a GPU and without a network: wheels with less in them, and the folder
`installed`, which PYTHONPATH must have there.

usage: build/venv/bin/python tests/python/carry.py, after `make consumers`
"""

import shutil
import zipfile
from importlib.metadata import distribution

from packages import CARRIED, DOWNLOADS

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


def chosen(files: list[str], wanted: tuple[str, ...]) -> list[str]:
    """The Python files; of a wheel also the folders, without which it cannot be imported from."""
    found = [file for file in files if file.startswith(wanted) and file.endswith((".py", "/"))]
    for start in wanted:
        assert any(file.startswith(start) for file in found), f"{start} is not in the package"
    return found


def main() -> None:
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
