// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/handshake.hpp"

#include <sodium.h>

#include <cstring>
#include <string>

#include "core/check.hpp"

namespace weft {
namespace {

static_assert(sizeof(Key) == crypto_auth_KEYBYTES && sizeof(Proof) == crypto_auth_BYTES);

void start_sodium() {
  WEFT_CHECK(
      Context{}, sodium_init() >= 0, ErrorCode::kNotAvailable, "connect: no random numbers here"
  );
}

std::string challenge_text(const Nonce& of_peer, const Nonce& of_root) {
  std::string text = "weft rank 0 ";
  text.append(of_peer.begin(), of_peer.end());
  text.append(of_root.begin(), of_root.end());
  return text;
}

std::string hello_text(const Nonce& of_peer, const Nonce& of_root, const Claim& claim) {
  std::string text = "weft rank r ";
  text.append(of_peer.begin(), of_peer.end());
  text.append(of_root.begin(), of_root.end());
  text.append(reinterpret_cast<const char*>(&claim), sizeof(claim));
  return text;
}

Proof prove(const Key& key, const std::string& text) {
  Proof proof;
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  crypto_auth(proof.data(), bytes, text.size(), key.data());
  return proof;
}

bool verify(const Key& key, const std::string& text, const Proof& proof) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return crypto_auth_verify(proof.data(), bytes, text.size(), key.data()) == 0;
}

}  // namespace

Key derive_key(std::string_view secret) {
  start_sodium();
  static constexpr std::string_view kPurpose = "weft rendezvous key";
  Key key;
  crypto_generichash(
      key.data(),
      key.size(),
      reinterpret_cast<const unsigned char*>(secret.data()),
      secret.size(),
      reinterpret_cast<const unsigned char*>(kPurpose.data()),
      kPurpose.size()
  );
  return key;
}

Nonce random_nonce() {
  start_sodium();
  Nonce nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

Challenge make_challenge(const Key& key, const Greeting& greeting) {
  Challenge challenge;
  challenge.nonce = random_nonce();
  challenge.proof = prove(key, challenge_text(greeting.nonce, challenge.nonce));
  return challenge;
}

bool is_proven(const Key& key, const Greeting& greeting, const Challenge& challenge) {
  return verify(key, challenge_text(greeting.nonce, challenge.nonce), challenge.proof);
}

Hello make_hello(
    const Key& key, const Greeting& greeting, const Challenge& challenge, const Claim& claim
) {
  Hello hello;
  hello.claim = claim;
  hello.proof = prove(key, hello_text(greeting.nonce, challenge.nonce, claim));
  return hello;
}

bool is_proven(
    const Key& key, const Greeting& greeting, const Challenge& challenge, const Hello& hello
) {
  return verify(key, hello_text(greeting.nonce, challenge.nonce, hello.claim), hello.proof);
}

}  // namespace weft
