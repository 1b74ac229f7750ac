// SPDX-License-Identifier: Apache-2.0
#include "survive/links.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
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

// A new process in the place of rank 1, which has connected to rank 0.
struct NextLife {
  static constexpr uint64_t kLife = 1;
  Links links;
  NextLife(const Group& group, const Links::Token& token, const Links::Card& card)
      : links(group, token) {
    links.join(kLife, std::vector{0}, std::vector<uint64_t>{0, 0}, {{card, {}}});
  }
};

// Runs `old` on rank 0, and `next` on the next life of rank 1, whose first one has ended.
void run_lives(
    const std::function<void(Links&, const Group&)>& old,
    const std::function<void(std::optional<NextLife>&, const Group&)>& next
) {
  run_threads(2, [&](const Group& group) {
    std::optional<Links> links(std::in_place, group, 20s);
    const Links::Token token = links->token();
    const Links::Card card = gather_values(group, links->own_card()).front();
    if (group.rank() == 0) {
      Heard heard;
      heard.listen(*links, [&] { return links->has_ended(1); });
      group.barrier();  // the next life may begin
      group.barrier();  // it has connected
      old(*links, group);
      return;
    }
    links.reset();
    group.barrier();
    std::optional<NextLife> life(std::in_place, group, token, card);
    group.barrier();
    next(life, group);
  });
}

TEST(LinksTest, BothMayConnectAtOnce) {
  const auto talk = [](Links& links, const Group& group, const std::string& to_them) {
    Heard heard;
    links.send(1 - group.rank(), FrameKind::kMail, bytes_of(to_them));
    heard.listen(links, [&] { return heard.texts.size() == 1; });
    group.barrier();
    links.send(1 - group.rank(), FrameKind::kMail, bytes_of(to_them));
    heard.listen(links, [&] { return heard.texts.size() == 2; });
    EXPECT_FALSE(links.has_ended(1 - group.rank()));
    EXPECT_EQ(heard.texts, std::vector(2, heard.texts.at(0)));
    return heard.texts.at(0);
  };
  run_lives(
      [&](Links& links, const Group& group) {
        const Links::Card card = gather_values(group, links.own_card()).back();
        links.take(1, NextLife::kLife, /*connects=*/true);
        links.learn(std::vector<uint64_t>{0, NextLife::kLife}, {{links.own_card(), card}});
        EXPECT_TRUE(links.is_open(1));  // while the other one's connection waits to be let in
        EXPECT_EQ(talk(links, group, "welcome"), "1: hello");
        group.barrier();
        Heard heard;
        heard.listen(links, [&] { return links.has_ended(1); });
      },
      [&](std::optional<NextLife>& life, const Group& group) {
        static_cast<void>(gather_values(group, life->links.own_card()));
        EXPECT_EQ(talk(life->links, group, "hello"), "0: welcome");
        group.barrier();
      }
  );
}

TEST(LinksTest, AnEndBeforeThatLifeIsTakenInIsKnown) {
  run_lives(
      [](Links& links, const Group& group) {
        Heard heard;
        heard.listen(links, [&] { return links.has_next(1); });
        group.barrier();
        heard.listen(links, [&] { return !links.has_next(1); });
        links.take(1, NextLife::kLife, /*connects=*/false);
        EXPECT_TRUE(links.has_ended(1));
      },
      [](std::optional<NextLife>& life, const Group& group) {
        group.barrier();
        life.reset();
      }
  );
}

TEST(LinksTest, WhatIsSentBeforeTheCardIsKnownGoesOnceItIs) {
  run_lives(
      [](Links& links, const Group& group) {
        const Links::Card card = gather_values(group, links.own_card()).back();
        const std::vector<uint64_t> lives = {0, NextLife::kLife};
        links.take(1, NextLife::kLife, /*connects=*/true);
        links.send(1, FrameKind::kMail, bytes_of(std::string("welcome")));
        links.learn(lives, {{links.own_card(), {}}});              // who does not know
        links.learn(std::vector<uint64_t>{0, 0}, {{card, card}});  // of the life before
        EXPECT_FALSE(links.is_open(1));
        links.learn(lives, {{links.own_card(), card}});
        EXPECT_TRUE(links.is_open(1));
        group.barrier();
      },
      [](std::optional<NextLife>& life, const Group& group) {
        static_cast<void>(gather_values(group, life->links.own_card()));
        Heard heard;
        heard.listen(life->links, [&] { return !heard.texts.empty(); });
        EXPECT_EQ(heard.texts, std::vector<std::string>{"0: welcome"});
        group.barrier();
      }
  );
}

TEST(LinksTest, AConnectionThatIsRefusedIsTriedAgain) {
  run_lives(
      [](Links& links, const Group& group) {
        const Context context = {.rank = 0, .num_ranks = 2};
        Links::Card card = links.own_card();
        const Endpoint any = resolve(card.address.data(), 0, context).front();
        const Socket listener(::socket(any.address.ss_family, SOCK_STREAM, 0));
        const auto* const address = reinterpret_cast<const sockaddr*>(&any.address);
        ASSERT_EQ(::bind(listener.get(), address, any.size), 0);  // and does not listen yet
        card.port = port_of(listener);
        links.take(1, NextLife::kLife, /*connects=*/true);
        links.learn(std::vector<uint64_t>{0, NextLife::kLife}, {{links.own_card(), card}});
        EXPECT_FALSE(links.is_open(1));
        EXPECT_TRUE(links.is_awaited(1));
        ASSERT_EQ(::listen(listener.get(), 1), 0);
        Heard heard;
        heard.listen(links, [&] { return links.is_open(1); });
        group.barrier();
      },
      [](std::optional<NextLife>& /*life*/, const Group& group) { group.barrier(); }
  );
}

TEST(LinksTest, OfTwoProcessesInALifeTheFirstIsHeardUntilItEnds) {
  run_lives(
      [](Links& links, const Group& group) {
        Heard heard;
        group.barrier();  // both have connected
        heard.listen(links, [&] { return !heard.texts.empty(); });
        EXPECT_EQ(heard.texts, std::vector<std::string>{"1: first"});
        EXPECT_TRUE(links.has_next(1));
        group.barrier();
        heard.listen(links, [&] { return !links.has_next(1); });
        links.take(1, NextLife::kLife, /*connects=*/false);
        EXPECT_TRUE(links.has_ended(1));
        group.barrier();
        heard.listen(links, [&] { return links.is_open(1); });
        EXPECT_FALSE(links.has_ended(1));
        group.barrier();
      },
      [](std::optional<NextLife>& life, const Group& group) {
        const Links::Token token = life->links.token();
        const Links::Card card = life->links.cards().front();
        Heard heard;
        std::optional<NextLife> second(std::in_place, group, token, card);
        life->links.send(0, FrameKind::kMail, bytes_of(std::string("first")));
        group.barrier();
        heard.listen(second->links, [&] { return !second->links.is_open(0); });
        EXPECT_FALSE(second->links.has_ended(0));  // it was turned away
        group.barrier();
        life.reset();
        group.barrier();
        second.emplace(group, token, card);
        group.barrier();
      }
  );
}

TEST(LinksTest, WhoWasOnlyOutOfReachHearsThatItIsLost) {
  run_threads(2, [](const Group& group) {
    Links links(group, 20s);
    Heard heard;
    const Links::Token token = links.token();
    const Links::Card card = gather_values(group, links.own_card()).front();
    if (group.rank() == 0) {
      heard.listen(links, [&] { return links.has_next(1); });
      links.send(1, FrameKind::kMail, bytes_of(std::string("others go on")));
      links.take(1, NextLife::kLife, /*connects=*/false);
      group.barrier();
      heard.listen(links, [&] { return !heard.texts.empty(); });
      EXPECT_EQ(heard.texts, std::vector<std::string>{"1: the next"});
      group.barrier();
      return;
    }
    NextLife next(group, token, card);
    group.barrier();
    links.send(0, FrameKind::kMail, bytes_of(std::string("the last")));
    heard.listen(links, [&] { return !links.has_unsent() && !heard.texts.empty(); });
    EXPECT_EQ(heard.texts, std::vector<std::string>{"0: others go on"});
    EXPECT_FALSE(links.has_ended(0));
    next.links.send(0, FrameKind::kMail, bytes_of(std::string("the next")));
    group.barrier();
  });
}

}  // namespace
}  // namespace weft::test
