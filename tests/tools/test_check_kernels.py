# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree

KERNELS = """// __global__ void in_a_comment(int call) {
namespace weft {
template <class Index>
__global__ void __launch_bounds__(kThreads) MACRO
    count_kernel(const __grid_constant__ CountLaunch call) {
  work(call);
}

__global__ void stop_kernel(int call) {}

Kernel<CountLaunch> kernel_of(bool is_wide) {
  return {is_wide ? count_kernel<int64_t> : count_kernel<int32_t>, kThreads};
}
Kernel<CountLaunch> kernel_of(const CountLaunch& call) {
  return kernel_of(call.is_wide);
}

void prepare_counts() {
  load(kernel_of(true).function);
  load(stop_kernel);
}

void launch_counts(const CountLaunch& call) {
  launch(kernel_of(call), call);
}
}  // namespace weft
"""
EXCHANGE = "void set_up() {\n  prepare_counts();\n}\n"


def check(tmp_path, kernels, exchange=EXCHANGE):
    return run_tool("check_kernels", write_tree(tmp_path, {"src/cuda/count.cu": kernels, "src/cuda/exchange.cpp": exchange}))


def test_accepts_kernels_that_an_exchange_loads(tmp_path):
    assert check(tmp_path, KERNELS) == (0, "check_kernels: 2 kernels are loaded ahead\n")


@pytest.mark.parametrize(
    "kernels, exchange, missing",
    [
        (KERNELS.replace("  load(stop_kernel);\n", ""), EXCHANGE, ["stop_kernel"]),
        (KERNELS.replace("  load(kernel_of(true).function);\n", ""), EXCHANGE, ["count_kernel"]),
        (KERNELS, "// prepare_counts();\n", ["count_kernel", "stop_kernel"]),
        (KERNELS.replace("prepare_counts", "get_ready"), EXCHANGE.replace("prepare_counts", "get_ready"), ["count_kernel", "stop_kernel"]),
    ],
)
def test_refuses(tmp_path, kernels, exchange, missing):
    status, out = check(tmp_path, kernels, exchange)
    assert status == 1 and out.count("src/cuda/count.cu: ") == len(missing)
    assert all(f"loads {name}\n" in out for name in missing)
