// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/handshake.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

constexpr auto kPeer = Handshake::Side::kPeer;
constexpr auto kRoot = Handshake::Side::kRoot;
constexpr Claim kClaim = {kProtocolVersion, 3, 8};

// A rank and rank 0 that have heard each other's greetings.
struct Talk {
  explicit Talk(std::string_view of_peer = "a secret of the tests")
      : peer(point_of(of_peer), kPeer) {
    EXPECT_TRUE(peer.hear(root.greeting()));
    EXPECT_TRUE(root.hear(peer.greeting()));
  }
  Handshake peer;
  Handshake root = Handshake(point_of("a secret of the tests"), kRoot);
};

TEST(HandshakeTest, BothSidesOfOneSecretProveIt) {
  const Talk talk;
  EXPECT_TRUE(talk.root.is_proven(kPeer, kClaim, talk.peer.prove(kPeer, kClaim)));
  EXPECT_TRUE(talk.peer.is_proven(kRoot, kClaim, talk.root.prove(kRoot, kClaim)));
}

TEST(HandshakeTest, AnotherSecretProvesNothing) {
  const Talk talk("a secret of the test");
  EXPECT_FALSE(talk.root.is_proven(kPeer, kClaim, talk.peer.prove(kPeer, kClaim)));
  EXPECT_FALSE(talk.peer.is_proven(kRoot, kClaim, talk.root.prove(kRoot, kClaim)));
}

TEST(HandshakeTest, AProofHoldsForItsOwnTalkOnly) {
  const Talk talk;
  const Talk later;
  EXPECT_NE(talk.peer.greeting().share, later.peer.greeting().share);
  EXPECT_FALSE(later.root.is_proven(kPeer, kClaim, talk.peer.prove(kPeer, kClaim)));
  // A rank that repeats a greeting that it has heard does not know the factor behind it.
  Handshake root(point_of("a secret of the tests"), kRoot);
  EXPECT_TRUE(root.hear(talk.peer.greeting()));
  EXPECT_FALSE(root.is_proven(kPeer, kClaim, talk.peer.prove(kPeer, kClaim)));
}

TEST(HandshakeTest, AProofCoversTheClaim) {
  const Talk talk;
  const Proof proof = talk.peer.prove(kPeer, kClaim);
  for (const Claim& claim :
       {Claim{kProtocolVersion + 1, 3, 8},
        Claim{kProtocolVersion, 4, 8},
        Claim{kProtocolVersion, 3, 9}}) {
    EXPECT_FALSE(talk.root.is_proven(kPeer, claim, proof));
  }
}

TEST(HandshakeTest, AProofSentBackIsNoProof) {
  const Talk talk;
  EXPECT_FALSE(talk.peer.is_proven(kRoot, kClaim, talk.peer.prove(kPeer, kClaim)));
  EXPECT_FALSE(talk.root.is_proven(kPeer, kClaim, talk.root.prove(kRoot, kClaim)));
}

// With such a share the key would not depend on the secret.
TEST(HandshakeTest, HearsNoShareThatIsNoPoint) {
  Handshake root(point_of("a secret of the tests"), kRoot);
  EXPECT_FALSE(root.hear(Greeting{}));  // all zero: the neutral element
  Greeting garbage;
  garbage.share.fill(0xff);
  EXPECT_FALSE(root.hear(garbage));
  const Handshake peer(point_of("a secret of the tests"), kPeer);
  Greeting foreign = peer.greeting();
  foreign.magic.back() = '3';
  EXPECT_FALSE(root.hear(foreign));
}

// Nothing that a stranger can see or ask for lets him tell a right guess from a wrong one: the
// shares of one secret are shares of any other too, so only a proof depends on it, and rank 0's
// comes after the other side's.
TEST(HandshakeTest, AShareFitsEverySecret) {
  for (const char* secret : {"a secret of the tests", "another secret of them"}) {
    const Handshake peer(point_of(secret), kPeer);
    Handshake guesser(point_of("a guess that is wrong"), kRoot);
    EXPECT_TRUE(guesser.hear(peer.greeting()));
  }
}

}  // namespace
}  // namespace weft
