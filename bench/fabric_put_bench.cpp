// SPDX-License-Identifier: Apache-2.0
// Measures the share of a plain stream of libfabric writes that the puts of transport ofi reach,
// with the same bytes in the same run. Two processes of this host; the provider is what WEFT_FABRIC
// says. Both ways take turns; shares are medians over the pairs, with the lower and upper quartile.
// The processor time of both ranks tells what a busy machine hides.
// usage: fabric_put_bench [--smoke | part of a shape's name]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <string_view>
#include <sys/resource.h>
#include <vector>

#include "cli/standard_streams.hpp"
#include "core/clock.hpp"
#include "fabric_stream.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/transport.hpp"

namespace {

using namespace weft;

constexpr uint64_t kMemoryBytes = 64 << 20;
constexpr uint64_t kScatter = 7919;  // prime: neighbours in the target are far apart in the source
constexpr int kExitSkipped = 77;

// One way of cutting a stream into puts.
struct Shape {
  const char* name;
  uint64_t bytes;        // of a put
  uint64_t per_call;     // puts of a call
  uint64_t stride;       // between them in the target, in puts: 1 for neighbours
  uint64_t plain_bytes;  // of a write of the plain stream
};

// A chunk is what an exchange puts at once: rows from anywhere, one behind the other in the target.
constexpr Shape kShapes[] = {
    {"8 MiB blocks", 8 << 20, 1, 1, 8 << 20},
    {"1 MiB blocks", 1 << 20, 1, 1, 1 << 20},
    {"256 KiB blocks", 256 << 10, 1, 1, 256 << 10},
    {"chunks of 32 x 14336 B", 14336, 32, 1, 14336 * 32},
    {"chunks of 32 x 8192 B", 8192, 32, 1, 8192 * 32},
    {"chunks of 32 x 4096 B", 4096, 32, 1, 4096 * 32},
    {"rows of 14336 B, apart", 14336, 32, 2, 14336},
    {"rows of 4096 B, apart", 4096, 32, 2, 4096},
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
        const uint64_t from = place * kScatter % (kMemoryBytes / shape.bytes);
        puts[i] = {
            .source = source_.data() + from * shape.bytes,
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

struct Cost {
  double seconds = 0;
  double cpu_seconds = 0;  // of both ranks
};

double cpu_seconds() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

template <class Run>
Cost cost_of(const Group& group, const Run& run) {
  group.barrier();
  const auto begin = Clock::now();
  const double cpu_begin = cpu_seconds();
  run();
  group.barrier();  // the receiver has all
  Cost cost = {.seconds = std::chrono::duration<double>(Clock::now() - begin).count()};
  const double own = cpu_seconds() - cpu_begin;
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&own, 1)))) {
    double of_rank = 0;
    std::memcpy(&of_rank, block.data(), sizeof of_rank);
    cost.cpu_seconds += of_rank;
  }
  return cost;
}

// `part` of the way from the least to the greatest: 0.5 is the median.
double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}

int run_rank(const Group& group, bool is_smoke, std::string_view only) {
  ofi::Selection selection = ofi::select_provider(group, "");
  ofi::Fabric fabric(*selection.provider, std::move(selection.info), Context{});
  bench::FabricStream stream(group, fabric, kMemoryBytes);
  Puts puts(group);
  if (group.rank() == 0) {
    fmt::print("provider {}, 2 processes, medians\n", fabric.name());
    fmt::print(
        "{:<24} {:>9} {:>10} {:>6} {:>13} {:>14} {:>15}\n",
        "",
        "puts GB/s",
        "plain GB/s",
        "share",
        "(quartiles)",
        "puts cpu s/GB",
        "plain cpu s/GB"
    );
  }
  const uint64_t total = is_smoke ? 1 << 20 : 64 << 20;
  const int num_rounds = is_smoke ? 1 : 15;
  for (const Shape& shape : kShapes) {
    if (std::string_view(shape.name).find(only) == std::string_view::npos) {
      continue;
    }
    const uint64_t calls = std::max<uint64_t>(total / shape.bytes / shape.per_call, 1);
    const uint64_t count = calls * shape.per_call;
    const uint64_t num_writes = count * shape.bytes / shape.plain_bytes;
    const double gigabytes = static_cast<double>(count * shape.bytes) / 1e9;
    std::vector<double> put_gbps;
    std::vector<double> plain_gbps;
    std::vector<double> shares;
    std::vector<double> put_cpu;
    std::vector<double> plain_cpu;
    for (int round = -1; round < num_rounds; ++round) {  // the first connects and warms up
      const Cost plain = cost_of(group, [&] { stream.run(shape.plain_bytes, num_writes); });
      const Cost put = cost_of(group, [&] { puts.run(shape, count); });
      if (round >= 0) {
        plain_gbps.push_back(gigabytes / plain.seconds);
        put_gbps.push_back(gigabytes / put.seconds);
        shares.push_back(100 * plain.seconds / put.seconds);
        plain_cpu.push_back(plain.cpu_seconds / gigabytes);
        put_cpu.push_back(put.cpu_seconds / gigabytes);
      }
    }
    if (group.rank() == 0) {
      fmt::print(
          "{:<24} {:>9.2f} {:>10.2f} {:>5.0f}% {:>6.0f} {:>5.0f}% {:>14.2f} {:>15.2f}\n",
          shape.name,
          quantile(put_gbps, 0.5),
          quantile(plain_gbps, 0.5),
          quantile(shares, 0.5),
          quantile(shares, 0.25),
          quantile(shares, 0.75),
          quantile(put_cpu, 0.5),
          quantile(plain_cpu, 0.5)
      );
      std::fflush(stdout);
    }
  }
  group.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  program::open_standard_streams();
  const bool is_smoke = argc > 1 && std::string_view(argv[1]) == "--smoke";
  const std::string obstacle = transport_obstacle("ofi", Group::local(1).front());
  if (!obstacle.empty()) {
    fmt::print("fabric_put_bench: {}\n", obstacle);
    return kExitSkipped;
  }
  const std::string_view only = argc > 1 && !is_smoke ? argv[1] : "";
  const auto statuses =
      run_forked(2, [&](Group& group) { return run_rank(group, is_smoke, only); });
  return std::any_of(statuses.begin(), statuses.end(), [](int status) { return status != 0; });
}
