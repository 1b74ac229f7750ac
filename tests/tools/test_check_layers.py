# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree


def check(tmp_path, texts):
    return run_tool("check_layers", write_tree(tmp_path, texts))


def test_accepts_includes_that_point_downwards(tmp_path):
    status, out = check(
        tmp_path,
        {
            "include/weft/plan.hpp": '#include <vector>\n#include "weft/tensor.hpp"\n',
            "src/exchange/exchange.cpp": '#include "plan/build.hpp"\n#include "exchange/a.hpp"\n',
            "src/core/gpu/devices.cpp": "#include <cuda_runtime_api.h>\n",
            "tests/unit/plan/plan_test.cpp": '#include "exchange/exchange.hpp"\n',
            "apps/weft/main.cpp": '#include "train/trainer.hpp"\n#include "report/table.hpp"\n',
            "apps/shared/report/table.hpp": "",
            "lab/train/trainer.hpp": "",
            "src/exchange/a.hpp": "",
            "src/plan/build.hpp": "",
        },
    )
    assert (status, out) == (0, "check_layers: 8 includes point downwards\n")


@pytest.mark.parametrize(
    "place, include, problem",
    [
        ("src/core/a.cpp", '"plan/b.hpp"', "src/core (floor 0) may not include src/plan (floor 1)"),
        ("src/group/a.cpp", '"plan/b.hpp"', "src/group (floor 1) may not include src/plan (floor 1)"),
        ("src/cuda/a.cu", '"cpu/c.hpp"', "may not include src/cpu (floor 4)"),
        ("src/core/a.cpp", '"../plan/b.hpp"', "src/core (floor 0) may not include src/plan (floor 1)"),
        ("src/plan/a.cpp", "<cuda_runtime.h>", "CUDA headers belong"),
        ("src/plan/a.cpp", "<torch/extension.h>", "torch headers are allowed nowhere"),
        ("include/weft/a.hpp", "<fmt/format.h>", "public headers include only"),
        ("include/weft/a.hpp", '"core/check.hpp"', "public headers include only"),
        ("include/weft/a.hpp", "<cuda_runtime.h>", "CUDA headers belong"),
        ("bench/a.cpp", '"table.hpp"', "no file of this tree has that name"),
        ("lab/train/a.cpp", '"run.hpp"', "lab/train (floor 8) may not include apps/weft (floor 9)"),
        ("examples/a.cpp", '"plan/build.hpp"', "examples include only public headers"),
    ],
)
def test_refuses(tmp_path, place, include, problem):
    texts = {place: f"// first line\n#include {include}\n", "src/plan/b.hpp": "", "src/cpu/c.hpp": "", "apps/weft/run.hpp": ""}
    status, out = check(tmp_path, texts)
    assert status == 1
    assert f"{place}:2: " in out and problem in out
