// SPDX-License-Identifier: Apache-2.0
#include "survive/links.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "support/errors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string text_in(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// What comes at one rank, until a condition holds.
struct Heard {
  std::vector<std::string> texts;  // "0: hello"
  Bytes answer;                    // to questions
  void listen(Links& links, const std::function<bool()>& is_over) {
    const Deadline deadline(20s);
    while (!is_over() && !deadline.has_passed()) {
      std::vector<pollfd> wanted = links.wanted();
      ::poll(wanted.data(), wanted.size(), 20);
      links.move(
          {.on_frame = [&](int rank, uint64_t /*life*/, const Frame& frame
                       ) { texts.push_back(std::to_string(rank) + ": " + text_in(frame.payload)); },
           .on_question = [&] { return answer; }}
      );
    }
    EXPECT_TRUE(is_over());
  }
};

TEST(LinksTest, MessagesComeInOrderAndAnEndIsSeen) {
  run_threads(3, [](const Group& group) {
    Links links(group, 20s);
    Heard heard;
    const std::string large(3 << 20, 'x');  // more than a socket takes at once
    if (group.rank() > 0) {
      links.send(0, FrameKind::kMail, bytes_of(std::string("first")));
      links.send(0, FrameKind::kMail, bytes_of(large));
      heard.listen(links, [&] { return !links.has_unsent(); });
      return;
    }
    heard.listen(links, [&] {
      return heard.texts.size() == 4 && links.has_ended(1) && links.has_ended(2);
    });
    for (const char* from : {"1: ", "2: "}) {
      std::vector<std::string> theirs;
      for (const std::string& one : heard.texts) {
        if (one.starts_with(from)) {
          theirs.push_back(one.substr(3));
        }
      }
      EXPECT_EQ(theirs, (std::vector<std::string>{"first", large}));
    }
  });
}

TEST(LinksTest, AStrangerIsNotHeard) {
  run_threads(2, [](const Group& group) {
    Links links(group, 20s);
    Heard heard;
    if (group.rank() == 0) {
      const Context context = {.rank = 0, .num_ranks = 2};
      const std::string address = links.own_card().address.data();
      const Socket silent =
          connect_to(resolve(address, links.own_card().port, context).front(), Deadline(5s));
      const Socket loud =
          connect_to(resolve(address, links.own_card().port, context).front(), Deadline(5s));
      const std::string noise(4096, '?');
      ASSERT_EQ(send_all(loud, bytes_of(noise), Deadline(5s)), IoState::kDone);
      heard.listen(links, [&] { return heard.texts.size() == 1; });
      EXPECT_EQ(heard.texts.front(), "1: after it");
      std::byte none;
      size_t done = 0;
      EXPECT_NE(receive_some(loud, {&none, 1}, done), IoState::kDone);
      group.barrier();
      return;
    }
    links.send(0, FrameKind::kMail, bytes_of(std::string("after it")));
    group.barrier();
  });
}

TEST(LinksTest, OnlyWhoHasTheTokenIsAnswered) {
  run_threads(2, [](const Group& group) {
    Links links(group, 20s);
    const Links::Card card = gather_values(group, links.own_card()).front();
    const Context context = {.rank = group.rank(), .num_ranks = 2};
    if (group.rank() == 1) {
      const auto ask = [&](const Links::Token& token) {
        return Links::ask(card.address.data(), card.port, token, Deadline(5s), context);
      };
      EXPECT_EQ(text_in(ask(links.token())), "who is there");
      const auto thrown = thrown_by([&] { static_cast<void>(ask({1, 2, 3, 4})); });
      EXPECT_EQ(thrown ? thrown->code : ErrorCode::kInternal, ErrorCode::kTimeout);
      links.send(0, FrameKind::kLeft, {});
      group.barrier();
      return;
    }
    Heard heard;
    const std::string answer = "who is there";
    heard.answer = Bytes(bytes_of(answer).begin(), bytes_of(answer).end());
    heard.listen(links, [&] { return !heard.texts.empty(); });
    group.barrier();
  });
}

}  // namespace
}  // namespace weft::test
