// SPDX-License-Identifier: Apache-2.0
#include "multirank/worlds.hpp"

#include "transport/transport.hpp"

namespace weft::test {

std::vector<std::string> worlds() {
  return {"loopback", "shm", "ofi"};
}

std::string obstacle(const std::string& world) {
  return transport_obstacle(world, Group::local(1).front());
}

std::vector<ExchangeSetup> in_world(const std::string& world, const ExchangeSetup& setup) {
  ExchangeSetup here = setup;
  here.transport = world;
  return {here};
}

}  // namespace weft::test
