# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree


def check(tmp_path, text, place="python/weft/plans/a.py"):
    return run_tool("check_tensors", write_tree(tmp_path, {place: text}))


@pytest.mark.parametrize(
    "line",
    [
        'torch.zeros(3, dtype=torch.int32, device="cpu")',
        'torch.tensor([1, 2], device=x.device)',
        "torch.full((2,), 0, **options)",
        "x.new_zeros(3)",
        "torch.zeros_like(x)",
        "nn.Parameter(torch.randn(3, 4) / 2)",
    ],
)
def test_accepts_a_tensor_with_its_device(tmp_path, line):
    status, out = check(tmp_path, line)
    assert (status, out) == (0, "check_tensors: 1 files make tensors with their device\n")


def test_leaves_examples_their_defaults(tmp_path):
    assert check(tmp_path, "torch.randn(3)", "python/weft/examples/a.py")[0] == 0


@pytest.mark.parametrize(
    "line, problem",
    [
        ("torch.arange(3)", "torch.arange without device"),
        ('torch.zeros(3, device="cpu")', "torch.zeros without dtype"),
        ("torch.empty(3)", "torch.empty without device and dtype"),
    ],
)
def test_refuses_what_follows_the_defaults_of_a_program(tmp_path, line, problem):
    status, out = check(tmp_path, f"x = 1\ny = f({line})")
    assert status == 1
    assert f"python/weft/plans/a.py:2: {problem}\n" in out
