// SPDX-License-Identifier: Apache-2.0
#include "moe/beside.hpp"

#include "core/log.hpp"
#include "weft/error.hpp"

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

Exchange make_beside_computation(
    const ExchangeConfig& wanted, const std::function<Exchange(const ExchangeConfig&)>& make
) {
  try {
    return make(wanted);
  } catch (const Error& error) {  // the same code on every rank
    if (!wanted.copy_engines || error.code() != ErrorCode::kOutOfMemory) {
      throw;
    }
    log(LogLevel::kWarn, "train: no exchanges by copy engines: {}", error.what());
  }
  ExchangeConfig config = wanted;
  config.copy_engines = false;
  return make(config);
}

}  // namespace weft::moe
