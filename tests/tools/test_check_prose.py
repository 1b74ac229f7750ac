# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree

GOOD = "// Rows of a call.\nint rows;\n// Returns them.\n// Of two lines.\nint get();\nint x;  // of a kind\n"


def check(tmp_path, files, *args):
    return run_tool("check_prose", write_tree(tmp_path, files), *args)


def test_counts_blocks_and_docstrings(tmp_path):
    files = {"src/a.hpp": GOOD, "python/a.py": '"""Reads a file."""\n\n\ndef f():\n    """Returns it."""\n'}
    status, out = check(tmp_path, files)
    assert status == 0
    assert out == "check_prose: 0.0 % of 2 comments and 0.0 % of 2 docstrings open with a fragment\n"


@pytest.mark.parametrize("words", ["Of all ranks.", "What a rank has.", "The same of two.", "As above."])
def test_refuses_more_fragments_than_before(tmp_path, words):
    status, out = check(tmp_path, {"src/a.hpp": f"// {words}\nint rows;\n"})
    assert status == 1 and "100.0 % of 1 comments" in out
    status, out = check(tmp_path, {"a.py": f'"""{words}"""\n'})
    assert status == 1 and "100.0 % of 1 docstrings" in out


def test_lists_them(tmp_path):
    files = {"src/a.hpp": GOOD + "// Whether it is so.\nbool is;\n", "lab/b.cpp": "// As a.\n"}
    status, out = check(tmp_path, files, "--list", "src")
    assert (status, out) == (0, "src/a.hpp:7: Whether it is so.\n")
