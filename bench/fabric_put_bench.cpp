// SPDX-License-Identifier: Apache-2.0
// What share of a plain stream of libfabric writes do the puts of transport ofi reach, with the
// same bytes in the same run? Two processes of this host; the provider is what WEFT_FABRIC says.
// usage: fabric_put_bench [--smoke]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "fabric_stream.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/ofi/select.hpp"
#include "transport/transport.hpp"

namespace {

using namespace weft;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kMemoryBytes = 64 << 20;
constexpr int kExitSkipped = 77;

// One way of cutting a stream into puts; the plain stream writes `bytes` at once.
struct Shape {
  const char* name;
  uint64_t bytes;     // of a put
  uint64_t per_call;  // puts of a call
  uint64_t stride;    // between them in the target, in puts: 1 for neighbours
};

constexpr Shape kShapes[] = {
    {"8 MiB blocks", 8 << 20, 1, 1},
    {"1 MiB blocks", 1 << 20, 1, 1},
    {"256 KiB blocks", 256 << 10, 1, 1},
    {"rows of 14336 B, neighbours", 14336, 16, 1},
    {"rows of 14336 B, apart", 14336, 16, 2},
    {"rows of 4096 B, neighbours", 4096, 16, 1},
    {"rows of 4096 B, apart", 4096, 16, 2},
};

class Puts {
 public:
  Puts(const Group& group)
      : rank_(group.rank()), transport_(make_transport("ofi", group, 1)), source_(kMemoryBytes) {
    own_ = transport_->allocate(kMemoryBytes);
    const auto refs = group.all_gather(std::as_bytes(std::span(&own_.ref, 1)));
    std::memcpy(&peer_, refs[1].data(), sizeof peer_);
    transport_->import(1, peer_);
  }

  // Collective: rank 0 puts, rank 1 waits for the signal.
  void run(const Shape& shape, uint64_t count) {
    if (rank_ == 1) {
      wanted_ += count;
      wait();
      return;
    }
    const uint64_t room = kMemoryBytes / shape.bytes / shape.stride / shape.per_call;
    std::vector<Put> puts(shape.per_call);
    for (uint64_t call = 0; call < count / shape.per_call; ++call) {
      for (uint64_t i = 0; i < shape.per_call; ++i) {
        const uint64_t place = (call % room * shape.per_call + i) * shape.stride;
        puts[i] = {
            .source = source_.data() + place * shape.bytes,
            .bytes = shape.bytes,
            .region = peer_.slot,
            .signal = 0,
            .offset = place * shape.bytes};
      }
      transport_->put(1, puts);
    }
  }

 private:
  void wait() {
    for (;;) {
      const uint32_t seen = transport_->doorbell();
      if (transport_->signal_value(0) >= wanted_) {
        return;
      }
      transport_->progress();
      transport_->park(seen, std::chrono::milliseconds(50));
    }
  }

  int rank_;
  std::unique_ptr<Transport> transport_;
  std::vector<std::byte> source_;
  Region own_;
  RegionRef peer_;
  uint64_t wanted_ = 0;
};

template <class Run>
double seconds_of(const Group& group, const Run& run) {
  group.barrier();
  const auto begin = Clock::now();
  run();
  group.barrier();  // the receiver has all
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run_rank(const Group& group, bool is_smoke) {
  ofi::Selection selection = ofi::select_provider(group, "");
  ofi::Fabric fabric(*selection.provider, std::move(selection.info), Context{});
  bench::FabricStream stream(group, fabric, kMemoryBytes);
  Puts puts(group);
  if (group.rank() == 0) {
    fmt::print("provider {}, 2 processes, medians\n", fabric.name());
    fmt::print("{:<30} {:>10} {:>10} {:>8}\n", "", "puts GB/s", "plain GB/s", "share");
  }
  const uint64_t total = is_smoke ? 1 << 20 : 256 << 20;
  const int num_rounds = is_smoke ? 1 : 5;
  for (const Shape& shape : kShapes) {
    const uint64_t calls = std::max<uint64_t>(total / shape.bytes / shape.per_call, 1);
    const uint64_t count = calls * shape.per_call;
    std::vector<double> put_gbps;
    std::vector<double> plain_gbps;
    for (int round = -1; round < num_rounds; ++round) {  // the first connects and warms up
      const auto bytes = static_cast<double>(count * shape.bytes);
      const double plain = seconds_of(group, [&] { stream.run(shape.bytes, count); });
      const double put = seconds_of(group, [&] { puts.run(shape, count); });
      if (round >= 0) {
        plain_gbps.push_back(bytes / plain / 1e9);
        put_gbps.push_back(bytes / put / 1e9);
      }
    }
    if (group.rank() == 0) {
      const double put = median(put_gbps);
      const double plain = median(plain_gbps);
      fmt::print(
          "{:<30} {:>10.2f} {:>10.2f} {:>7.0f}%\n", shape.name, put, plain, 100 * put / plain
      );
      std::fflush(stdout);
    }
  }
  group.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_smoke = argc > 1 && std::string_view(argv[1]) == "--smoke";
  const std::string obstacle = transport_obstacle("ofi", Group::local(1).front());
  if (!obstacle.empty()) {
    fmt::print("fabric_put_bench: {}\n", obstacle);
    return kExitSkipped;
  }
  const auto statuses = run_forked(2, [&](Group& group) { return run_rank(group, is_smoke); });
  return std::any_of(statuses.begin(), statuses.end(), [](int status) { return status != 0; });
}
