// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/handshake.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

struct Talk {
  Key key = derive_key("a secret of the tests");
  Greeting greeting = {kMagic, random_nonce()};
  Challenge challenge = make_challenge(key, greeting);
  Claim claim = {kProtocolVersion, 3, 8};
  Hello hello = make_hello(key, greeting, challenge, claim);
};

TEST(HandshakeTest, BothSidesOfOneSecretProveIt) {
  const Talk talk;
  EXPECT_TRUE(is_proven(talk.key, talk.greeting, talk.challenge));
  EXPECT_TRUE(is_proven(talk.key, talk.greeting, talk.challenge, talk.hello));
}

TEST(HandshakeTest, AnotherSecretProvesNothing) {
  const Talk talk;
  const Key other = derive_key("a secret of the test");
  EXPECT_FALSE(is_proven(other, talk.greeting, talk.challenge));
  EXPECT_FALSE(is_proven(other, talk.greeting, talk.challenge, talk.hello));
}

TEST(HandshakeTest, AProofHoldsForItsOwnNoncesAlone) {
  const Talk talk;
  const Talk later;
  EXPECT_NE(talk.challenge.nonce, later.challenge.nonce);
  EXPECT_FALSE(is_proven(talk.key, later.greeting, talk.challenge));
  EXPECT_FALSE(is_proven(talk.key, talk.greeting, later.challenge, talk.hello));
  EXPECT_FALSE(is_proven(talk.key, later.greeting, talk.challenge, talk.hello));
}

TEST(HandshakeTest, AProofCoversTheClaim) {
  constexpr uint32_t kOther = kProtocolVersion + 1;
  const Talk talk;
  for (const Claim& claim :
       {Claim{kOther, 3, 8}, Claim{kProtocolVersion, 4, 8}, Claim{kProtocolVersion, 3, 9}}) {
    Hello hello = talk.hello;
    hello.claim = claim;
    EXPECT_FALSE(is_proven(talk.key, talk.greeting, talk.challenge, hello));
  }
}

TEST(HandshakeTest, RankZeroProofSentBackIsNoProof) {
  const Talk talk;
  const Hello echo = {talk.claim, talk.challenge.proof};
  EXPECT_FALSE(is_proven(talk.key, talk.greeting, talk.challenge, echo));
}

}  // namespace
}  // namespace weft
