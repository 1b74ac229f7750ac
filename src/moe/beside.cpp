// SPDX-License-Identifier: Apache-2.0
#include "moe/beside.hpp"

namespace weft::moe {
namespace {

// From so many elements of a token on, copy engines cost computation less (docs/overlap.md). Their
// room grows with the ranks; of more they are not chosen.
constexpr int kCopiedHidden = 2048;
constexpr int kCopiedRanks = 8;

}  // namespace

bool copies_beside_computation(const TrainConfig& config, const Group& group) {
  CopyEngines choice = config.overlap.copy_engines;
  if (choice == CopyEngines::kAuto) {
    choice = Env::read().copy_engines;
  }
  const bool is_better = config.model.hidden >= kCopiedHidden && group.num_ranks() <= kCopiedRanks;
  const bool is_wanted =
      choice == CopyEngines::kAlways || (choice == CopyEngines::kAuto && is_better);
  return is_wanted && config.overlap.is_on && config.device.kind == Device::Kind::kCuda &&
         group.num_ranks() > 1 && group.topology().domains.size() == 1;
}

}  // namespace weft::moe
