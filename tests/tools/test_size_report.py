# SPDX-License-Identifier: Apache-2.0
from run_tool import run_tool, write_tree


def check(tmp_path, lines_of):
    texts = {place: "x\n" * lines for place, lines in lines_of.items()}
    return run_tool("size_report", write_tree(tmp_path, texts))


def test_tells_the_sum_and_the_median(tmp_path):
    sizes = {"src/a.cpp": 10, "src/b.cpp": 500, "src/cuda/c.cuh": 600, "build/d.cpp": 9999}
    assert check(tmp_path, sizes) == (0, "size_report: 3 files, 1110 lines, median 500\n")


def test_refuses_files_above_their_limit(tmp_path):
    status, out = check(
        tmp_path, {"src/a.cpp": 501, "src/cuda/b.cuh": 601, "include/weft/c.hpp": 201, "t.py": 99}
    )
    assert status == 1
    assert "src/a.cpp: 501 lines (at most 500)" in out
    assert "src/cuda/b.cuh: 601 lines (at most 600)" in out
    assert "include/weft/c.hpp: 201 lines (at most 200)" in out
    assert out.endswith("size_report: 3 findings\n")
