// SPDX-License-Identifier: Apache-2.0
#include "multirank/worlds.hpp"

namespace weft::test {

std::vector<std::string> worlds() {
  return {"loopback", "shm"};
}

std::string obstacle(const std::string& /*world*/) {
  return {};
}

std::vector<ExchangeSetup> in_world(const std::string& world, const ExchangeSetup& setup) {
  ExchangeSetup here = setup;
  here.transport = world;
  return {here};
}

}  // namespace weft::test
