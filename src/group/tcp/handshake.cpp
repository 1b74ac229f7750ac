// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/handshake.hpp"

#include <sodium.h>

#include "core/check.hpp"

namespace weft {
namespace {

static_assert(sizeof(Point) == crypto_core_ristretto255_BYTES);
static_assert(sizeof(Proof) == crypto_auth_BYTES);
static_assert(sizeof(Proof) == crypto_auth_KEYBYTES);

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

template <size_t kBytes>
std::array<unsigned char, kBytes> hash(std::string_view text) {
  static constexpr std::string_view kPurpose = "weft rendezvous 4";
  std::array<unsigned char, kBytes> result;
  crypto_generichash(
      result.data(), kBytes, bytes_of(text), text.size(), bytes_of(kPurpose), kPurpose.size()
  );
  return result;
}

std::string text_of(Handshake::Side side, const Claim& claim) {
  std::string text = side == Handshake::Side::kRoot ? "rank 0 " : "rank r ";
  return text.append(reinterpret_cast<const char*>(&claim), sizeof claim);
}

}  // namespace

Point point_of(std::string_view secret) {
  WEFT_CHECK(
      Context{}, sodium_init() >= 0, ErrorCode::kNotAvailable, "connect: no random numbers here"
  );
  Point point;
  crypto_core_ristretto255_from_hash(
      point.data(), hash<crypto_core_ristretto255_HASHBYTES>(secret).data()
  );
  return point;
}

Handshake::Handshake(const Point& secret, Side side) : side_(side) {
  crypto_core_ristretto255_scalar_random(factor_.data());
  const int result =
      crypto_scalarmult_ristretto255(own_.share.data(), factor_.data(), secret.data());
  WEFT_CHECK(Context{}, result == 0, ErrorCode::kInternal, "connect: the secret gives no point");
}

bool Handshake::hear(const Greeting& other) {
  Point shared;
  if (other.magic != kMagic ||
      crypto_scalarmult_ristretto255(shared.data(), factor_.data(), other.share.data()) != 0) {
    return false;
  }
  std::string text(shared.begin(), shared.end());
  const bool is_root = side_ == Side::kRoot;
  for (const Greeting& greeting : {is_root ? other : own_, is_root ? own_ : other}) {
    text.append(greeting.share.begin(), greeting.share.end());
  }
  key_ = hash<sizeof key_>(text);
  return true;
}

Proof Handshake::prove(Side side, const Claim& claim) const {
  const std::string text = text_of(side, claim);
  Proof proof;
  crypto_auth(proof.data(), bytes_of(text), text.size(), key_.data());
  return proof;
}

bool Handshake::is_proven(Side side, const Claim& claim, const Proof& proof) const {
  const std::string text = text_of(side, claim);
  return crypto_auth_verify(proof.data(), bytes_of(text), text.size(), key_.data()) == 0;
}

}  // namespace weft
