// SPDX-License-Identifier: Apache-2.0
// A captured graph that plans, dispatches and combines, replayed with new routing: no call waits
// for the host. One rank for each GPU, as threads; two ranks where there is one GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "weft/weft.hpp"

namespace {

constexpr int kExpertsPerRank = 4;
constexpr int kTopk = 2;
constexpr int64_t kTokens = 64;
constexpr int64_t kHidden = 256;
constexpr int kReplays = 3;

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

// Memory of the exchange's GPU as a tensor of T.
template <class T>
struct OnGpu {
  OnGpu(weft::Exchange& exchange, int64_t rows, int64_t cols)
      : buffer(exchange.allocate(rows, cols, weft::matrix<T>(nullptr, 0, 0).dtype)) {}
  [[nodiscard]] const weft::Tensor& tensor() const { return buffer.tensor(); }
  void upload(const std::vector<T>& from, cudaStream_t stream) const {
    const size_t bytes = from.size() * sizeof(T);
    check(cudaMemcpyAsync(tensor().data, from.data(), bytes, cudaMemcpyHostToDevice, stream));
  }
  void download(std::vector<T>& to, cudaStream_t stream) const {
    const size_t bytes = to.size() * sizeof(T);
    check(cudaMemcpyAsync(to.data(), tensor().data, bytes, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  }

  weft::Buffer buffer;
};

// Makes the calls of one rank. Returns the number of wrong elements.
int run_rank(weft::Group& group, int num_gpus) {
  const weft::Device device = {weft::Device::Kind::kCuda, group.rank() % num_gpus};
  const int num_experts = kExpertsPerRank * group.num_ranks();
  check(cudaSetDevice(device.index));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  weft::Exchange exchange(
      group,
      {.hidden = kHidden,
       .max_tokens = kTokens,
       .num_experts = num_experts,
       .max_topk = kTopk,
       .device = device}
  );

  // Room for every route of every rank, so that none is dropped.
  const int64_t budget = kTokens * kTopk * group.num_ranks();
  const OnGpu<int32_t> topk_idx(exchange, kTokens, kTopk);
  const OnGpu<float> x(exchange, kTokens, kHidden);
  const OnGpu<float> rows(exchange, budget, kHidden);
  const OnGpu<float> sums(exchange, kTokens, kHidden);

  const weft::CallOptions on_stream = {.stream = stream};
  const auto step = [&] {
    weft::Plan plan =
        exchange.plan({.topk_idx = topk_idx.tensor()}, {.row_budget = budget}, on_stream);
    exchange.dispatch(plan, {.x = x.tensor()}, {.rows = rows.tensor()}, on_stream);
    // ... kernels of this rank's experts: plan.on_device() says where their rows are
    exchange.combine(plan, {.rows = rows.tensor()}, {.x = sums.tensor()}, on_stream);
    return plan;
  };

  std::vector<int32_t> routes(kTokens * kTopk, 0);
  topk_idx.upload(routes, stream);
  static_cast<void>(step());  // of the size that will be captured
  check(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  static_cast<void>(step());
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  group.barrier();

  int num_wrong = 0;
  for (int n = 0; n < kReplays; ++n) {
    for (size_t i = 0; i < routes.size(); ++i) {
      routes[i] =
          static_cast<int32_t>((i * 7 + static_cast<size_t>(n)) % static_cast<size_t>(num_experts));
    }
    std::vector<float> values(kTokens * kHidden, static_cast<float>(n + 1));
    topk_idx.upload(routes, stream);
    x.upload(values, stream);
    check(cudaGraphLaunch(replay, stream));
    sums.download(values, stream);
    exchange.check();  // throws what went wrong on the GPU
    const auto expected = static_cast<float>(kTopk * (n + 1));
    num_wrong += static_cast<int>(std::count_if(values.begin(), values.end(), [&](float v) {
      return v != expected;
    }));
  }
  group.barrier();
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return num_wrong;
}

}  // namespace

int main() {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || num_gpus == 0) {
    std::printf("there is no GPU\n");
    return 77;
  }
  const int num_ranks = std::clamp(num_gpus, 2, 8);
  weft::run_threads(num_ranks, [&](weft::Group& group) {
    if (const int num_wrong = run_rank(group, num_gpus); num_wrong > 0) {
      std::printf("rank %d: %d elements are wrong\n", group.rank(), num_wrong);
      std::exit(1);
    }
  });
  std::printf("%d ranks replayed a graph %d times with new routing\n", num_ranks, kReplays);
  return 0;
}
