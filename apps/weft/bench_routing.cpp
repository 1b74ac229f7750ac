// SPDX-License-Identifier: Apache-2.0
#include "bench_routing.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "plan/random_routing.hpp"
#include "plan/routing_file.hpp"
#include "workload.hpp"

namespace weft::program {
namespace {

constexpr uint64_t kMadeUpVersions = 4;
constexpr int64_t kFileVersions = 16;

BenchRouting made_up_routing(const BenchOptions& options, int num_ranks) {
  RandomRouting spec;
  spec.num_tokens = options.num_tokens;
  spec.num_experts = options.num_experts;
  spec.topk = options.topk;
  spec.popularity = options.skew > 0 ? Popularity::kZipf : Popularity::kUniform;
  spec.zipf_exponent = options.skew;
  spec.with_weights = false;
  BenchRouting routing;
  routing.num_experts = options.num_experts;
  routing.topk = options.topk;
  for (uint64_t version = 0; version < kMadeUpVersions; ++version) {
    spec.seed = mix_seed(options.seed, version);
    auto& routes = routing.versions.emplace_back();
    for (int rank = 0; rank < num_ranks; ++rank) {
      routes.push_back(random_routing(spec, rank));
    }
  }
  return routing;
}

// Records spread evenly over the file.
BenchRouting file_routing(const std::string& path, int num_ranks) {
  RoutingFileReader file(path);
  WEFT_CHECK(
      Context{},
      file.shape().num_ranks == num_ranks,
      ErrorCode::kFile,
      "bench: {} holds routing of {} ranks (this run has {})",
      path,
      file.shape().num_ranks,
      num_ranks
  );
  WEFT_CHECK(
      Context{}, file.num_records() > 0, ErrorCode::kFile, "bench: {} holds no records", path
  );
  BenchRouting routing;
  routing.num_experts = file.shape().num_experts;
  routing.topk = file.shape().topk;
  const int64_t num_versions = std::min(kFileVersions, file.num_records());
  for (int64_t version = 0; version < num_versions; ++version) {
    routing.versions.push_back(file.read(version * file.num_records() / num_versions).routes);
  }
  return routing;
}

}  // namespace

BenchRouting bench_routing(const BenchOptions& options, int num_ranks) {
  return options.routing_file.empty() ? made_up_routing(options, num_ranks)
                                      : file_routing(options.routing_file, num_ranks);
}

}  // namespace weft::program
