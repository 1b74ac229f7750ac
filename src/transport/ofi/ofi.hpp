// SPDX-License-Identifier: Apache-2.0
// Ranks on any hosts, over any network that libfabric drives; make_domains() does the same between
// domains and shares memory inside them. The library is loaded at run time; ofi_none.cpp answers
// for builds without its headers. This header needs neither.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.hpp"

namespace weft {

// Returns why libfabric, or a provider for these ranks, is missing; empty: both are there. `kind`
// is the provider, or "provider/domain"; empty: what WEFT_FABRIC says.
[[nodiscard]] std::string ofi_obstacle(const Group& group, std::string_view kind);

// Collective. Throws the same Error on every rank. No call of the transport waits for a peer longer
// than the options' timeout.
[[nodiscard]] std::unique_ptr<Transport> make_ofi(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view kind
);
[[nodiscard]] std::unique_ptr<Transport> make_domains(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view kind
);

// Report that `weft info --fabric` shows, for ranks of this host.
struct FabricReport {
  struct Entry {
    std::string provider;  // as in the table of providers
    std::string state;     // "chosen", "usable" or why not
    std::string fabric;    // libfabric's names, empty where there is an obstacle
    std::string domain;
    std::string memory;  // how memory is registered
    std::string remark;
  };
  std::string library;  // "libfabric 1.17", or why there is none
  std::string chosen;   // empty: none
  std::string why;      // `chosen` was chosen
  std::string address;  // that IP providers are bound to
  int num_queues = 1;
  std::vector<Entry> providers;  // best first
};
[[nodiscard]] FabricReport fabric_report();

}  // namespace weft
