// SPDX-License-Identifier: Apache-2.0
// Requirements of every transport. A file per transport names its cases and gets all tests of
// transport_conformance.cpp; bodies run on every rank, as threads or as processes, and throw where
// they find a fault.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "transport/transport.hpp"
#include "weft/group.hpp"

namespace weft::testing {

enum class Launch : uint8_t { kThreads, kProcesses };

struct TransportCase {
  std::string transport;  // as for make_transport()
  int num_ranks = 2;
  Launch launch = Launch::kThreads;
  bool refuses_at_once = true;  // a wrong put throws where it is called, not at a later call
  int ranks_per_domain = 0;     // 0: one domain; else it divides num_ranks
};

// A name for each case: letters, digits and underscores of its members.
[[nodiscard]] std::string case_name(const ::testing::TestParamInfo<TransportCase>& info);
std::ostream& operator<<(std::ostream& out, const TransportCase& value);

// 1, 2, 3, 4 and 8 ranks.
[[nodiscard]] std::vector<TransportCase> all_sizes(
    const std::string& transport, Launch launch = Launch::kThreads
);

// One rank's view of a test: its transport and one region per rank, all imported.
class Wire {
 public:
  static constexpr uint32_t kNumSignals = 16;

  Wire(Group& group, const TransportCase& test, uint64_t region_bytes);

  [[nodiscard]] int rank() const { return group.rank(); }
  [[nodiscard]] int num_ranks() const { return group.num_ranks(); }
  [[nodiscard]] int next() const { return (rank() + 1) % num_ranks(); }
  [[nodiscard]] int previous() const { return (rank() + num_ranks() - 1) % num_ranks(); }
  [[nodiscard]] uint32_t slot_of(int peer) const { return refs[static_cast<size_t>(peer)].slot; }
  // Collective: every rank's region, known and imported everywhere.
  void share(const Region& region);
  // Parks until this rank's signal has `wanted`; throws after 30 s.
  void wait(uint32_t signal, uint64_t wanted) const;
  // Looks until the peer is in that state; throws after 20 s.
  void await_state(int peer, PeerState wanted) const;

  Group& group;
  std::unique_ptr<Transport> transport;
  Region own;
  std::vector<RegionRef> refs;  // [num_ranks]
};

// Throws with `what` in its text.
void require(bool condition, const std::string& what);
// Calls `action`, which must throw Error with code kTransport and `text` in its message.
void require_refusal(const std::function<void()>& action, const std::string& text);

class TransportConformance : public ::testing::TestWithParam<TransportCase> {
 protected:
  void SetUp() override;
  void TearDown() override;
  // Runs `body` on every rank and reports what it threw; ends with a barrier of all ranks.
  void run(const std::function<void(Wire&)>& body, uint64_t region_bytes = 4096) const;
};

}  // namespace weft::testing
