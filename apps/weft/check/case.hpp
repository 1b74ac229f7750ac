// SPDX-License-Identifier: Apache-2.0
// One comparison of the exchange with the reference, and the list of them that `weft check` goes
// through.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/ranks.hpp"
#include "measure/workload.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::program {

// How much room each receiver has, in rows more than it needs.
enum class Room : uint8_t {
  kExact,       // the plan decides
  kSpare,       // a few rows more: slack that nobody may touch
  kOneRowShort  // something must be dropped
};

struct CheckCase {
  std::string row;  // where the result stands in the table
  std::string column;
  Workload workload = {};
  PlanOptions options = {};
  Room room = Room::kExact;
  bool is_direct = true;  // output in memory that peers can write
  int num_plans = 1;      // alive at once, used in reverse order
  CombineScale scale = CombineScale::kNone;
  Mover mover = Mover::kAuto;
  bool copy_engines = false;
};

struct CheckSettings {
  std::string transport = "auto";
  int num_threads = 0;
  DeviceChoice device = {};
};

// An exchange that cases share as long as they want the same of it: among many processes one takes
// longer to make than a case takes to run.
struct SharedExchange {
  ExchangeConfig wanted;
  Exchange exchange;
};

// Collective. Dispatch and combine of every plan, compared bit for bit with the reference; empty if
// all is equal on this rank, else the first difference. `shared`: of the case before, if that went
// well; of this one afterwards.
[[nodiscard]] std::optional<std::string> run_case(
    const Group& group,
    const CheckCase& check_case,
    const CheckSettings& settings,
    std::optional<SharedExchange>& shared
);

// Cases by layout and dtype: exact, padded, room to spare, one row short.
[[nodiscard]] std::vector<CheckCase> matrix_cases(int num_ranks, bool is_quick, uint64_t seed);
// Cases that go wrong first: no tokens, one expert for all, holes, odd sizes, maps, several plans,
// ...
[[nodiscard]] std::vector<CheckCase> hard_cases(int num_ranks, bool is_quick, uint64_t seed);

// Variants of the cases: as older GPUs move rows, and, for types that copy engines carry, by them.
// The row's name says it.
[[nodiscard]] std::vector<CheckCase> with_vector_moves(std::vector<CheckCase> cases);
[[nodiscard]] std::vector<CheckCase> by_copy_engines(std::vector<CheckCase> cases);

}  // namespace weft::program
