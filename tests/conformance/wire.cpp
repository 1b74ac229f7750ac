// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "conformance/transport_conformance.hpp"
#include "core/clock.hpp"
#include "weft/error.hpp"

namespace weft::testing {

std::string case_name(const ::testing::TestParamInfo<TransportCase>& info) {
  std::string name = fmt::format(
      "{}_{}_{}",
      info.param.transport,
      info.param.launch == Launch::kThreads ? "threads" : "processes",
      info.param.num_ranks
  );
  if (info.param.ranks_per_domain > 0) {
    name += fmt::format("_by_{}", info.param.ranks_per_domain);
  }
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_'
  );
  return name;
}

std::ostream& operator<<(std::ostream& out, const TransportCase& value) {
  return out << value.transport << " on " << value.num_ranks << " ranks";
}

std::vector<TransportCase> all_sizes(const std::string& transport, Launch launch) {
  std::vector<TransportCase> cases;
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    cases.push_back({.transport = transport, .num_ranks = num_ranks, .launch = launch});
  }
  return cases;
}

Wire::Wire(Group& of, const TransportCase& test, uint64_t region_bytes)
    : group(of), transport(make_transport(test.transport, of, kNumSignals)) {
  share(transport->allocate(region_bytes));
}

void Wire::share(const Region& region) {
  own = region;
  const auto blocks = group.all_gather(std::as_bytes(std::span(&region.ref, 1)));
  refs.assign(blocks.size(), {});
  for (size_t peer = 0; peer < blocks.size(); ++peer) {
    std::memcpy(&refs[peer], blocks[peer].data(), sizeof(RegionRef));
    transport->import(static_cast<int>(peer), refs[peer]);
  }
  group.barrier();  // an owner may release at once what all have imported
}

void Wire::wait(uint32_t signal, uint64_t wanted) const {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  for (;;) {
    const uint32_t seen = transport->doorbell();
    const uint64_t value = transport->signal_value(signal);
    if (value >= wanted) {
      return;
    }
    transport->progress();
    const auto left = deadline - Clock::now();
    require(
        left.count() > 0,
        fmt::format("rank {}: signal {} is {} (expected {})", rank(), signal, value, wanted)
    );
    transport->park(seen, left);
  }
}

void Wire::await_state(int peer, PeerState wanted) const {
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (transport->peer_state(peer) != wanted) {
    require(
        Clock::now() < deadline,
        fmt::format(
            "rank {} is in state {} (expected {})",
            peer,
            static_cast<int>(transport->peer_state(peer)),
            static_cast<int>(wanted)
        )
    );
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void require(bool condition, const std::string& what) {
  if (!condition) {
    throw std::runtime_error("require: " + what);
  }
}

void require_refusal(const std::function<void()>& action, const std::string& text) {
  try {
    action();
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kTransport, fmt::format("wrong code: {}", error.what()));
    require(
        std::string_view(error.what()).find(text) != std::string_view::npos,
        fmt::format("\"{}\" does not say \"{}\"", error.what(), text)
    );
    return;
  }
  require(false, fmt::format("nothing was thrown (expected \"{}\")", text));
}

void TransportConformance::SetUp() {
  if (GetParam().ranks_per_domain > 0) {
    ::setenv("WEFT_RANKS_PER_DOMAIN", std::to_string(GetParam().ranks_per_domain).c_str(), 1);
  }
}

void TransportConformance::TearDown() {
  ::unsetenv("WEFT_RANKS_PER_DOMAIN");
}

void TransportConformance::run(const std::function<void(Wire&)>& body, uint64_t region_bytes)
    const {
  const TransportCase& test = GetParam();
  const auto on_rank = [&](Group& group) {
    Wire wire(group, test, region_bytes);
    body(wire);
    group.barrier();  // nobody leaves while a peer still moves bytes
  };
  if (test.launch == Launch::kThreads) {
    ASSERT_NO_THROW(run_threads(test.num_ranks, on_rank));
    return;
  }
  const auto statuses = run_forked(test.num_ranks, [&](Group& group) {
    on_rank(group);
    return 0;
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<size_t>(test.num_ranks), 0));
}

}  // namespace weft::testing
