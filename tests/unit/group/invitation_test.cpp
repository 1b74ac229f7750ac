// SPDX-License-Identifier: Apache-2.0
#include "group/invitation.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/printable.hpp"
#include "group/control_plane.hpp"
#include "group/topology.hpp"
#include "group_test.hpp"

namespace weft {
namespace {

std::string hex(std::string_view bytes) {
  std::string text = "weft-";
  for (const char one : bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(one));
  }
  return text;
}

Invitation sample(int num_ranks, const std::string& host) {
  std::vector<std::vector<int>> domains;
  for (int rank = 0; rank < num_ranks; ++rank) {
    domains.push_back({rank});
  }
  const std::vector<std::string> hosts(domains.size(), host);
  return {
      .num_ranks = num_ranks,
      .topology = make_topology(domains, hosts, false),
      .transport = "shm",
      .address = "127.0.0.1",
      .port = 5000,
      .token = {1, 2, 3, ~uint64_t{0}}};
}

void expect_refused(const std::string& text) {
  expect_error(
      ErrorCode::kInvalidArgument,
      "rejoin: \"" + printable(text.substr(0, 80)) + "\" is no",
      [&] { static_cast<void>(Invitation::from_text(text)); }
  );
}

TEST(InvitationTest, IsReadAsItWasWrittenForAsManyRanksAsThereMayBe) {
  const Invitation longest = sample(kMaxRanks, std::string(64, 'h'));
  const Invitation read = Invitation::from_text(longest.text());
  EXPECT_EQ(read.text(), longest.text());
  EXPECT_EQ(read.token, longest.token);
  EXPECT_EQ(read.topology.domains, longest.topology.domains);
}

TEST(InvitationTest, RefusesWhatIsNone) {
  const std::string text = sample(2, "host").text();
  const std::vector<std::string> others = {
      "",
      "weft-",
      text.substr(0, text.size() - 1),
      text.substr(0, text.size() - 2),
      text + "7d",
      "weft-\xff\x1b",
      hex("[]"),
      hex("{\"hosts\":[\"\xff\"]}"),
      hex(std::string(200'000, '[')),
      "weft-" + std::string(4'000'000, '2')};
  std::ranges::for_each(others, expect_refused);
}

}  // namespace
}  // namespace weft
