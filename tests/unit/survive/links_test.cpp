// SPDX-License-Identifier: Apache-2.0
#include "survive/links.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
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

// Messages that come at one rank, until a condition holds.
struct Heard {
  std::vector<std::string> texts;  // "0: hello"
  Bytes answer;                    // to questions
  void listen(Links& links, const std::function<bool()>& is_over) {
    const Deadline deadline(20s);
    bool is_done = is_over();
    while (!is_done && !deadline.has_passed()) {
      std::vector<pollfd> wanted = links.wanted();
      ::poll(wanted.data(), wanted.size(), 20);
      links.move(
          {.on_frame = [&](int rank, uint64_t /*life*/, const Frame& frame
                       ) { texts.push_back(std::to_string(rank) + ": " + text_in(frame.payload)); },
           .on_question = [&] { return answer; }}
      );
      is_done = is_over();
    }
    EXPECT_TRUE(is_done);
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

// Runs `ask` on rank 1, with the card of rank 0, which answers `kAnswer` to who asks.
constexpr std::string_view kAnswer = "who is there";
void run_asker(const std::function<void(Links&, const Links::Card&)>& ask) {
  run_threads(2, [&](const Group& group) {
    Links links(group, 20s);
    const Links::Card card = gather_values(group, links.own_card()).front();
    if (group.rank() == 1) {
      ask(links, card);
      links.send(0, FrameKind::kLeft, {});
      group.barrier();
      return;
    }
    Heard heard;
    const auto answer = std::as_bytes(std::span(kAnswer));
    heard.answer = Bytes(answer.begin(), answer.end());
    heard.listen(links, [&] { return !heard.texts.empty(); });
    group.barrier();
  });
}

Bytes ask_at(int port, const Links::Token& token) {
  return Links::ask("127.0.0.1", port, token, Deadline(5s), {.rank = 1, .num_ranks = 2});
}

void expect_nobody(int port, const Links::Token& token) {
  const auto thrown = thrown_by([&] { static_cast<void>(ask_at(port, token)); });
  EXPECT_EQ(
      text_of(thrown),
      "rejoin: none of the ranks is at " + endpoint_text("127.0.0.1", port) +
          " (another process is); ask a rank that is left for an invitation [rank 1/2]"
  );
}

TEST(LinksTest, OnlyWhoHasTheTokenIsAnswered) {
  run_asker([](const Links& links, const Links::Card& card) {
    EXPECT_EQ(text_in(ask_at(card.port, links.token())), kAnswer);
    expect_nobody(card.port, {1, 2, 3, 4});
  });
}

TEST(LinksTest, WhoSaysNothingGivesWayToWhoComes) {
  run_asker([](const Links& links, const Links::Card& card) {
    const Endpoint place = resolve("127.0.0.1", card.port, {}).front();
    std::vector<Socket> silent;
    for (int i = 0; i < 200; ++i) {
      silent.push_back(connect_to(place, Deadline(5s)));
    }
    EXPECT_EQ(text_in(ask_at(card.port, links.token())), kAnswer);
  });
}

// Hands on to `to` what comes at a port of its own, and what is answered, of one connection.
class Relay {
 public:
  explicit Relay(int to) : to_(resolve("127.0.0.1", to, {}).front()) {}
  [[nodiscard]] int port() const { return port_of(listener_); }

 private:
  void run(const std::stop_token& is_over) const {
    std::string host;
    Socket from;
    while (!from.is_open() && !is_over.stop_requested()) {
      static_cast<void>(wait_readable(listener_, Deadline(20ms)));
      from = accept_from(listener_, host);
    }
    Socket to = connect_to(to_, Deadline(5s));
    while (!is_over.stop_requested()) {
      for (const auto& [source, target] : {std::pair(&from, &to), std::pair(&to, &from)}) {
        std::array<std::byte, 256> bytes = {};
        size_t done = 0;
        static_cast<void>(receive_some(*source, bytes, done));
        static_cast<void>(send_all(*target, std::span(bytes).first(done), Deadline(5s)));
      }
      std::this_thread::sleep_for(1ms);
    }
  }

  Socket listener_ = listen_on("127.0.0.1", 0, {});
  Endpoint to_;
  std::jthread thread_{[this](const std::stop_token& is_over) { run(is_over); }};
};

TEST(LinksTest, AProofHoldsWhereItWasAskedForOnly) {
  run_asker([](const Links& links, const Links::Card& card) {
    const Relay relay(card.port);
    expect_nobody(relay.port(), links.token());
    EXPECT_EQ(text_in(ask_at(card.port, links.token())), kAnswer);
  });
}

// A new process in the place of rank 1, which connects to rank 0.
struct NextLife {
  static constexpr uint64_t kLife = next_life(0, 7);
  Links links;
  NextLife(
      const Group& group, const Links::Token& token, const Links::Card& card, uint64_t life = kLife
  )
      : links(group, token) {
    links.join(life, std::vector{0}, std::vector<uint64_t>{0, 0}, {{card, {}}});
  }
  // While rank 0 listens, too.
  void meet() {
    Heard().listen(links, [this] { return links.is_open(0); });
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
      group.barrier();  // it connects
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
        heard.listen(links, [&] { return links.has_next(1, NextLife::kLife); });
        group.barrier();
        heard.listen(links, [&] { return !links.has_next(1, NextLife::kLife); });
        links.take(1, NextLife::kLife, /*connects=*/false);
        EXPECT_TRUE(links.has_ended(1));
      },
      [](std::optional<NextLife>& life, const Group& group) {
        life->meet();
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
        const size_t before = links.wanted().size();
        links.learn(lives, {{links.own_card(), {}}});              // who does not know
        links.learn(std::vector<uint64_t>{0, 0}, {{card, card}});  // of the life before
        EXPECT_EQ(links.wanted().size(), before);
        links.learn(lives, {{links.own_card(), card}});
        EXPECT_EQ(links.wanted().size(), before + 1);  // it connects
        Heard heard;
        heard.listen(links, [&] { return links.is_open(1); });
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

// The card of rank 1's next life says that it listens where a test does.
Links::Card card_at(const Socket& listener, const Links& links) {
  Links::Card card = links.own_card();
  card.port = port_of(listener);
  return card;
}

void connect_to_next(Links& links, const Links::Card& card) {
  links.take(1, NextLife::kLife, /*connects=*/true);
  links.learn(std::vector<uint64_t>{0, NextLife::kLife}, {{links.own_card(), card}});
}

Socket accept_at(const Socket& listener, Links& links) {
  Socket socket;
  Heard().listen(links, [&] {
    std::string host;
    socket = accept_from(listener, host);
    return socket.is_open();
  });
  return socket;
}

const auto kNextStandsBy = [](std::optional<NextLife>& life, const Group& group) {
  life.reset();
  group.barrier();
};

TEST(LinksTest, AConnectionThatIsRefusedIsTriedAgain) {
  run_lives(
      [](Links& links, const Group& group) {
        const Endpoint any = resolve("127.0.0.1", 0, {}).front();
        const Socket listener(::socket(any.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0));
        const auto* const address = reinterpret_cast<const sockaddr*>(&any.address);
        ASSERT_EQ(::bind(listener.get(), address, any.size), 0);  // and does not listen yet
        connect_to_next(links, card_at(listener, links));
        Heard().listen(links, [&, moves = 0]() mutable { return ++moves > 2; });
        EXPECT_TRUE(links.is_awaited(1));
        ASSERT_EQ(::listen(listener.get(), 1), 0);
        static_cast<void>(accept_at(listener, links));
        group.barrier();
      },
      kNextStandsBy
  );
}

TEST(LinksTest, OthersAreHeardWhileAConnectionIsNotTaken) {
  run_lives(
      [](Links& links, const Group& group) {
        const Endpoint any = resolve("127.0.0.1", 0, {}).front();
        const Socket full(::socket(any.address.ss_family, SOCK_STREAM, 0));
        const auto* const address = reinterpret_cast<const sockaddr*>(&any.address);
        ASSERT_EQ(::bind(full.get(), address, any.size), 0);
        ASSERT_EQ(::listen(full.get(), 0), 0);
        const Endpoint place = resolve("127.0.0.1", port_of(full), {}).front();
        const Socket only = connect_to(place, Deadline(5s));  // what comes next is not answered
        const size_t before = links.wanted().size();
        connect_to_next(links, card_at(full, links));
        EXPECT_TRUE(links.is_awaited(1));
        EXPECT_EQ(links.wanted().size(), before + 1);  // it is waited for together with all others
        group.barrier();
      },
      kNextStandsBy
  );
}

// A process that listens where a rank did, and answers as well as it can.
TEST(LinksTest, WhoListensInARanksPlaceLearnsNothing) {
  run_lives(
      [](Links& links, const Group& group) {
        const Socket listener = listen_on("127.0.0.1", 0, {});
        connect_to_next(links, card_at(listener, links));
        const Socket socket = accept_at(listener, links);
        const auto hear = [&](auto& message) {
          const auto bytes = std::as_writable_bytes(std::span(&message, 1));
          size_t done = 0;
          Heard().listen(links, [&] {
            return receive_some(socket, bytes, done) != IoState::kMore;
          });
          return done == bytes.size();
        };
        Handshake stranger(point_of("what it made up itself"), Handshake::Side::kRoot);
        Greeting greeting;
        ASSERT_TRUE(hear(greeting));
        ASSERT_TRUE(stranger.hear(greeting));
        ASSERT_EQ(send_all(socket, value_bytes(stranger.greeting()), Deadline(5s)), IoState::kDone);
        Hello hello;
        ASSERT_TRUE(hear(hello));
        EXPECT_FALSE(stranger.is_proven(Handshake::Side::kPeer, hello.claim, hello.proof));
        const Proof proof = stranger.prove(Handshake::Side::kRoot, hello.claim);
        ASSERT_EQ(send_all(socket, value_bytes(proof), Deadline(5s)), IoState::kDone);
        std::byte more;
        EXPECT_FALSE(hear(more));  // the end
        EXPECT_TRUE(links.is_awaited(1));
        group.barrier();
      },
      kNextStandsBy
  );
}

constexpr uint64_t kOtherLife = next_life(0, 5);

// Runs `old` on rank 0, which has heard the first of two processes for one turn in the place of
// rank 1 and turned the other one away; `next` on both.
void run_two_lives(
    const std::function<void(Links&)>& old,
    const std::function<void(std::optional<NextLife>&)>& next
) {
  run_lives(
      [&](Links& links, const Group& group) {
        Heard heard;
        heard.listen(links, [&] { return links.has_next(1, NextLife::kLife); });
        group.barrier();
        heard.listen(links, [&] { return !heard.texts.empty(); });
        EXPECT_EQ(heard.texts, std::vector<std::string>{"1: first"});
        EXPECT_FALSE(links.has_next(1, kOtherLife));
        group.barrier();
        old(links);
        group.barrier();
      },
      [&](std::optional<NextLife>& life, const Group& group) {
        life->meet();
        group.barrier();
        NextLife second(group, life->links.token(), life->links.cards().front(), kOtherLife);
        second.meet();
        Heard().listen(second.links, [&] { return !second.links.is_open(0); });
        EXPECT_FALSE(second.links.has_ended(0));
        EXPECT_TRUE(second.links.is_awaited(0)) << "it tries again";
        life->links.send(0, FrameKind::kMail, bytes_of(std::string("first")));
        group.barrier();
        next(life);
        second.meet();
        group.barrier();
      }
  );
}

TEST(LinksTest, OfTwoProcessesForATurnTheFirstIsHeardUntilItEnds) {
  run_two_lives(
      [](Links& links) {
        Heard().listen(links, [&] { return links.has_next(1, kOtherLife); });
        EXPECT_FALSE(links.has_next(1, NextLife::kLife));
        links.take(1, kOtherLife, /*connects=*/false);
        EXPECT_FALSE(links.has_ended(1));
        EXPECT_TRUE(links.is_open(1));
      },
      [](std::optional<NextLife>& life) { life.reset(); }
  );
}

TEST(LinksTest, WhoWasTurnedAwayIsMetOnceOthersHaveTakenItIn) {
  run_two_lives(
      [](Links& links) {
        links.take(1, kOtherLife, /*connects=*/false);
        EXPECT_TRUE(links.is_awaited(1));
        Heard().listen(links, [&] { return links.is_open(1); });
        EXPECT_FALSE(links.has_next(1, NextLife::kLife)) << "for a turn that is over";
      },
      [](std::optional<NextLife>& /*life*/) {}
  );
}

TEST(LinksTest, WhoWasOnlyOutOfReachHearsThatItIsLost) {
  run_threads(2, [](const Group& group) {
    Links links(group, 20s);
    Heard heard;
    const Links::Token token = links.token();
    const Links::Card card = gather_values(group, links.own_card()).front();
    if (group.rank() == 0) {
      heard.listen(links, [&] { return links.has_next(1, NextLife::kLife); });
      links.send(1, FrameKind::kMail, bytes_of(std::string("others go on")));
      links.take(1, NextLife::kLife, /*connects=*/false);
      group.barrier();
      heard.listen(links, [&] { return !heard.texts.empty(); });
      EXPECT_EQ(heard.texts, std::vector<std::string>{"1: the next"});
      group.barrier();
      return;
    }
    NextLife next(group, token, card);
    next.meet();
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
