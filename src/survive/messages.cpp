// SPDX-License-Identifier: Apache-2.0
#include "survive/messages.hpp"

#include <algorithm>
#include <cstring>

#include "group/control_plane.hpp"

namespace weft {
namespace {

void append(Bytes& bytes, std::span<const std::byte> more) {
  const size_t begin = bytes.size();
  bytes.resize(begin + more.size());
  std::ranges::copy(more, bytes.begin() + static_cast<ptrdiff_t>(begin));
}

// Returns the whole values in `bytes`.
template <class T>
std::vector<T> values_of(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

}  // namespace

uint64_t number_of(const Roll::Members& members) {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a, by words
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  add(members.epoch);
  for (const int rank : members.ranks) {
    add(static_cast<uint64_t>(rank));
    add(members.lives[static_cast<size_t>(rank)]);
  }
  return hash;
}

Bytes encode(const Number& number, std::span<const std::byte> rest) {
  Bytes bytes;
  append(bytes, value_bytes(number));
  append(bytes, rest);
  return bytes;
}

Bytes encode(const Vote& vote, uint64_t set) {
  const Number number = {.epoch = vote.epoch, .of = vote.committed, .set = set};
  return encode(number, std::as_bytes(std::span(vote.wishes)));
}

Bytes encode(const Welcome& welcome) {
  const Roll::Members& members = welcome.agreed.members;
  std::vector<uint64_t> lives;
  for (size_t rank = 0; rank < members.lives.size(); ++rank) {
    lives.push_back(2 * members.lives[rank] + (members.has(static_cast<int>(rank)) ? 1 : 0));
  }
  const Number number = {
      .epoch = members.epoch, .of = welcome.agreed.committed, .set = number_of(members)};
  Bytes bytes = encode(number, std::as_bytes(std::span(lives)));
  append(bytes, std::as_bytes(std::span(welcome.cards)));
  return bytes;
}

std::optional<Number> take_number(std::span<const std::byte>& payload) {
  Number number;
  if (payload.size() < sizeof number) {
    return std::nullopt;
  }
  std::memcpy(&number, payload.data(), sizeof number);
  payload = payload.subspan(sizeof number);
  return number;
}

Vote vote_in(const Number& number, std::span<const std::byte> rest) {
  return {.epoch = number.epoch, .committed = number.of, .wishes = values_of<Wish>(rest)};
}

Welcome welcome_in(const Number& number, std::span<const std::byte> rest, size_t num_ranks) {
  const size_t bytes = std::min(rest.size(), num_ranks * sizeof(uint64_t));
  Welcome welcome = {
      .agreed =
          {.members = {.epoch = number.epoch, .ranks = {}, .lives = {}}, .committed = number.of},
      .cards = values_of<Links::Card>(rest.subspan(bytes))};
  Roll::Members& members = welcome.agreed.members;
  for (const uint64_t bits : values_of<uint64_t>(rest.first(bytes))) {
    if (bits % 2 != 0) {
      members.ranks.push_back(static_cast<int>(members.lives.size()));
    }
    members.lives.push_back(bits / 2);
  }
  return welcome;
}

}  // namespace weft
