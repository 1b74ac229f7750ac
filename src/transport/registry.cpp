// SPDX-License-Identifier: Apache-2.0
// Every transport of this build stands in one table. A new one needs its source, a line here and a
// file in tests/conformance.
#include <algorithm>
#include <array>
#include <string>

#include "core/check.hpp"
#include "core/log.hpp"
#include "group/agree.hpp"
#include "transport/common.hpp"
#include "transport/faulty/faulty_transport.hpp"
#include "transport/mapped/mapped_transport.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/transport.hpp"

namespace weft {
namespace {

struct Entry {
  std::string_view name;
  // Returns why the transport cannot be used, as far as is known without trying; empty: it can.
  // `kind` is what follows the colon in a name, often nothing.
  std::string (*obstacle)(const Group& group, std::string_view kind);
  decltype(&make_ofi) make;  // collective; throws on every rank or on none
  bool has_kinds = false;
};

// Ranks of different domains must not share memory even where they could: WEFT_RANKS_PER_DOMAIN
// makes one machine behave like several.
std::string domain_obstacle(const Group& group, std::string_view /*kind*/) {
  const auto& domains = group.topology().domains;
  if (domains.size() <= 1) {
    return {};
  }
  return fmt::format(
      "the ranks are in {} domains (ranks {} and {} do not map each other's memory)",
      domains.size(),
      domains[0].front(),
      domains[1].front()
  );
}

std::string loopback_obstacle(const Group& group, std::string_view kind) {
  return group.topology().one_process ? domain_obstacle(group, kind)
                                      : "the ranks are not threads of one process";
}

std::string domains_obstacle(const Group& group, std::string_view kind) {
  const auto& domains = group.topology().domains;
  if (domains.size() <= 1) {
    return "all ranks are in one domain";
  }
  const auto has_many = [](const auto& ranks) { return ranks.size() > 1; };
  if (std::none_of(domains.begin(), domains.end(), has_many)) {
    return "no domain has several ranks";
  }
  return ofi_obstacle(group, kind);
}

template <std::unique_ptr<MemorySource> (*kMakeMemory)()>
std::unique_ptr<Transport> make_mapped(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view
) {
  return std::make_unique<MappedTransport>(kMakeMemory(), group, num_signals, options.members);
}

// Lists the best transport first.
constexpr std::array kEntries = {
    Entry{"loopback", loopback_obstacle, make_mapped<make_loopback_memory>},
    Entry{"shm", domain_obstacle, make_mapped<make_shm_memory>},
    Entry{"domains", domains_obstacle, make_domains, true},
    Entry{"ofi", ofi_obstacle, make_ofi, true},
};

// "ofi:tcp" is transport ofi of kind tcp.
std::string_view kind_of(std::string_view name) {
  const size_t colon = name.find(':');
  return colon == std::string_view::npos ? std::string_view() : name.substr(colon + 1);
}

// Returns the entries that a name stands for, best first; "auto" stands for all.
std::vector<const Entry*> entries_of(std::string_view name) {
  std::vector<const Entry*> entries;
  for (const Entry& entry : kEntries) {
    const std::string_view asked = entry.has_kinds ? name.substr(0, name.find(':')) : name;
    if (name == "auto" || entry.name == asked) {
      entries.push_back(&entry);
    }
  }
  return entries;
}

// Throws the same Error on all ranks if any of them knows an obstacle.
void check_obstacle(const Entry& entry, const Group& group, std::string_view kind) {
  agree(group, [&] {
    const std::string obstacle = entry.obstacle(group, kind);
    WEFT_CHECK(
        context_of(group, entry.name),
        obstacle.empty(),
        ErrorCode::kNotAvailable,
        "open({}): {}",
        entry.name,
        obstacle
    );
  });
}

// Logs, on one rank, which transports that had no obstacle failed all the same.
void tell_passed_over(
    const Entry& taken,
    const std::vector<std::string>& failures,
    const Group& group,
    const TransportOptions& options
) {
  const int speaker = options.members.empty() ? 0 : options.members.front();
  if (!failures.empty() && group.rank() == speaker) {
    log(LogLevel::kWarn,
        "open(auto): transport {} joins the ranks, as a nearer one cannot: {}",
        taken.name,
        fmt::join(failures, "; "));
  }
}

}  // namespace

Region Transport::lend(std::byte* /*data*/, uint64_t /*bytes*/, const Device& device) {
  WEFT_RAISE(
      (Context{.transport = name()}), ErrorCode::kNotAvailable, "lend: {}", lend_obstacle(device)
  );
}

std::string Transport::lend_obstacle(const Device& /*device*/) const {
  return fmt::format("transport {} carries no memory of its caller's", name());
}

std::vector<std::string> transport_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) {
    names.emplace_back(entry.name);
  }
  return names;
}

std::string transport_obstacle(std::string_view name, const Group& group) {
  if (const auto faulty = parse_faulty_name(name)) {
    return transport_obstacle(faulty->inner, group);
  }
  const std::vector<const Entry*> entries = entries_of(name);
  if (entries.empty()) {
    return fmt::format(
        "there is no transport \"{}\" (known: auto, {})", name, fmt::join(transport_names(), ", ")
    );
  }
  std::vector<std::string> reasons;
  for (const Entry* entry : entries) {
    std::string reason = entry->obstacle(group, kind_of(name));
    if (reason.empty() || entries.size() == 1) {
      return reason;
    }
    reasons.push_back(fmt::format("{}: {}", entry->name, reason));
  }
  return fmt::format("{}", fmt::join(reasons, "; "));
}

std::unique_ptr<Transport> make_transport(
    std::string_view name, const Group& group, uint32_t num_signals, const TransportOptions& options
) {
  if (options.members.empty()) {  // else they have agreed before
    agree_on_name(name, group);
  }
  if (const auto faulty = parse_faulty_name(name)) {
    auto inner = make_transport(faulty->inner, group, num_signals, options);
    return std::make_unique<FaultyTransport>(std::move(inner), faulty->plan, group);
  }
  const std::vector<const Entry*> entries = entries_of(name);
  WEFT_CHECK_ARG(
      context_of(group), !entries.empty(), "open({}): {}", name, transport_obstacle(name, group)
  );
  std::vector<std::string> reasons;
  std::vector<std::string> failures;  // of transports without a known obstacle
  for (const Entry* entry : entries) {
    bool is_tried = false;
    try {
      check_obstacle(*entry, group, kind_of(name));
      is_tried = true;
      auto transport = entry->make(group, num_signals, options, kind_of(name));
      tell_passed_over(*entry, failures, group, options);
      return transport;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotAvailable || entries.size() == 1) {
        throw;
      }
      reasons.emplace_back(error.what());
      if (is_tried) {
        failures.push_back(reasons.back());
      }
    }
  }
  WEFT_RAISE(
      context_of(group),
      ErrorCode::kNotAvailable,
      "open(auto): no transport joins these ranks ({})",
      fmt::join(reasons, "; ")
  );
}

}  // namespace weft
