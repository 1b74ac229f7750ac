// SPDX-License-Identifier: Apache-2.0
#include "group/invitation.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <charconv>
#include <iterator>
#include <vector>

#include "group/control_plane.hpp"
#include "group/topology.hpp"

namespace weft {
namespace {

constexpr std::string_view kBegin = "weft-";
// Length of a text for as many ranks as there may be, whose hosts' names are as long as Linux lets
// them be.
constexpr size_t kMostBytes = 1024 + size_t{100} * kMaxRanks;

nlohmann::json json_of(const Invitation& invitation) {
  const Topology& topology = invitation.topology;
  return {
      {"version", kProtocolVersion},
      {"ranks", invitation.num_ranks},
      {"domains", topology.domains},
      {"hosts", topology.host_of},
      {"threads", topology.one_process},
      {"transport", invitation.transport},
      {"cookie", invitation.cookie},
      {"address", invitation.address},
      {"port", invitation.port},
      {"token", invitation.token}};
}

// True if the topology has every rank once, and a host for each.
bool is_whole(const Invitation& invitation) {
  const Topology& topology = invitation.topology;
  const auto num_ranks = static_cast<size_t>(invitation.num_ranks);
  std::vector<bool> is_there(num_ranks);
  size_t num_there = 0;
  for (const std::vector<int>& domain : topology.domains) {
    for (const int rank : domain) {
      if (rank < 0 || rank >= invitation.num_ranks || is_there[static_cast<size_t>(rank)]) {
        return false;
      }
      is_there[static_cast<size_t>(rank)] = true;
      ++num_there;
    }
  }
  return num_there == num_ranks && topology.host_of.size() == num_ranks;
}

// Reads an invitation; nothing if it is none of this version.
std::optional<Invitation> invitation_in(const std::string& bytes) {
  try {
    const nlohmann::json json = nlohmann::json::parse(bytes);  // which does not follow the nesting

    Invitation invitation;
    invitation.num_ranks = json.at("ranks");
    const bool may_be = json.at("version") == kProtocolVersion && invitation.num_ranks > 0 &&
                        invitation.num_ranks <= kMaxRanks;
    if (!may_be) {
      return std::nullopt;
    }
    invitation.topology.domains = json.at("domains");
    invitation.topology.host_of = json.at("hosts");
    invitation.topology.one_process = json.at("threads");
    invitation.transport = json.at("transport");
    invitation.cookie = json.at("cookie");
    invitation.address = json.at("address");
    invitation.port = json.at("port");
    invitation.token = json.at("token");
    if (!is_whole(invitation)) {
      return std::nullopt;
    }
    invitation.topology = make_topology(
        invitation.topology.domains, invitation.topology.host_of, invitation.topology.one_process
    );
    return invitation;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

std::string Invitation::text() const {
  std::string text(kBegin);
  for (const char one :
       json_of(*this).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) {
    fmt::format_to(std::back_inserter(text), "{:02x}", static_cast<unsigned char>(one));
  }
  return text;
}

Invitation Invitation::from_text(std::string_view text) {
  const size_t digits = text.starts_with(kBegin) ? text.size() - kBegin.size() : 0;
  std::string bytes(digits % 2 == 0 && digits <= 2 * kMostBytes ? digits / 2 : 0, '\0');
  bool is_right = !bytes.empty();
  for (size_t i = 0; is_right && i < bytes.size(); ++i) {
    const char* const at = text.data() + kBegin.size() + 2 * i;
    uint8_t byte = 0;
    is_right = std::from_chars(at, at + 2, byte, 16).ptr == at + 2;
    bytes[i] = static_cast<char>(byte);
  }
  std::optional<Invitation> invitation = is_right ? invitation_in(bytes) : std::nullopt;
  WEFT_CHECK_ARG(
      Context{},
      invitation.has_value(),
      "rejoin: \"{}\" is no invitation of this version of Weft (Exchange::invitation() makes one)",
      text.substr(0, 80)
  );
  return *std::move(invitation);
}

}  // namespace weft
