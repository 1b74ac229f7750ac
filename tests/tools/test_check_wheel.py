# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import zipfile

import pytest
from run_tool import TOOLS

MODULE = """int PyErr_Occurred(void); int PyInit__core(void) { return PyErr_Occurred(); }
void weft_pool_malloc(void) {}
void weft_pool_free(void) {}
"""
EXPORTS = TOOLS.parent / "python" / "csrc" / "exports.map"


def build(tmp_path, source, *options):
    code, module = tmp_path / "core.c", tmp_path / "_core.abi3.so"
    code.write_text(source)
    command = ["gcc", "-shared", "-fPIC", code, "-o", module, *options]
    subprocess.run(command, check=True)
    return module


def check(path, *options):
    """(exit status, what it says against the file)"""
    command = [sys.executable, TOOLS / "check_wheel.py", path, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def pack(tmp_path, module, *names):
    wheel = tmp_path / "weft-1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weft/__init__.py", "")
        for name in names:
            archive.write(module, name)
    return wheel


def test_accepts_a_module_that_asks_for_libc_and_python_alone(tmp_path):
    module = build(tmp_path, MODULE, f"-Wl,--version-script={EXPORTS}")
    assert check(module) == (0, "")
    names = ["weft/_core.abi3.so", "weft.libs/libhwy-1a2b3c4d.so.1.0.3"]
    assert check(pack(tmp_path, module, *names)) == (0, "")


def test_finds_names_that_others_would_see(tmp_path):
    module = build(tmp_path, MODULE + "int helper(void) { return 1; }\n")
    promised = "['PyInit__core', 'weft_pool_free', 'weft_pool_malloc']"
    exported = promised.replace("'weft_pool_free'", "'helper', 'weft_pool_free'")
    said = f"check_wheel: _core.abi3.so exports {exported}, not {promised}\n"
    assert check(module) == (1, said)


def test_finds_libraries_that_a_machine_may_lack(tmp_path):
    other = tmp_path / "libother.so.7"
    (tmp_path / "other.c").write_text("int other(void) { return 1; }\n")
    command = ["gcc", "-shared", "-fPIC", tmp_path / "other.c", "-o", other]
    subprocess.run([*command, "-Wl,-soname,libother.so.7"], check=True)
    source = MODULE.replace("return PyErr", "int other(void); return other() + PyErr")
    module = build(tmp_path, source, other, f"-Wl,--version-script={EXPORTS}")
    status, said = check(module)
    assert status == 1
    assert said.splitlines() == [
        "check_wheel: _core.abi3.so needs libother.so.7",
        "check_wheel: _core.abi3.so calls other, which no library promises",
    ]


@pytest.mark.parametrize(
    "names, options, problem",
    [
        ([], [], "has 0 modules _core"),
        (["weft/_core.abi3.so", "weft/bin/weft"], [], "has code in weft/bin/weft"),
        (["weft/_core.abi3.so"], ["--limit-mb", "0.001"], "MB, more than 0.001"),
    ],
)
def test_finds_what_a_wheel_should_not_be(tmp_path, names, options, problem):
    module = build(tmp_path, MODULE, f"-Wl,--version-script={EXPORTS}")
    status, said = check(pack(tmp_path, module, *names), *options)
    assert status == 1 and said.count("\n") == 1 and problem in said
