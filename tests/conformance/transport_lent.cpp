// SPDX-License-Identifier: Apache-2.0
// Memory of the caller's as a region. A transport may refuse it, but only as a whole.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "conformance/transport_conformance.hpp"
#include "weft/error.hpp"

namespace weft::testing {
namespace {

// Some travel as copies where copies are allowed, the last ones do not.
constexpr uint64_t kSizes[] = {0, 1, 300, 4096, 512 << 10, (512 << 10) + 1, (3 << 20) + 5};
constexpr uint64_t kBytes = std::accumulate(std::begin(kSizes), std::end(kSizes), uint64_t{0});

std::byte pattern(int from, uint64_t i) {
  return static_cast<std::byte>((static_cast<uint64_t>(from) * 57 + i * 11 + (i >> 9)) & 0xff);
}

std::vector<std::byte> make_pattern(int from) {
  std::vector<std::byte> block(kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) {
    block[i] = pattern(from, i);
  }
  return block;
}

void require_pattern(const std::byte* data, int from) {
  for (uint64_t i = 0; i < kBytes; ++i) {
    if (data[i] != pattern(from, i)) {
      require(false, fmt::format("byte {} from rank {} is wrong", i, from));
    }
  }
}

// Null if the transport takes no memory of the caller's, which it must say in the right way.
std::optional<Region> lend(Wire& wire, std::vector<std::byte>& memory) {
  try {
    const Region region = wire.transport->lend(memory.data(), memory.size(), Device());
    require(wire.transport->lend_obstacle(Device()).empty(), "lent in spite of an obstacle");
    return region;
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kNotAvailable, fmt::format("wrong code: {}", error.what()));
    const std::string obstacle = wire.transport->lend_obstacle(Device());
    require(
        !obstacle.empty() &&
            std::string_view(error.what()).find(obstacle) != std::string_view::npos,
        fmt::format("\"{}\" does not say \"{}\"", error.what(), obstacle)
    );
    return {};
  }
}

// One put of each size, all neighbours, into `region` of a peer.
std::vector<Put> puts_of(const std::byte* source, uint32_t region, uint32_t signal) {
  std::vector<Put> puts;
  uint64_t at = 0;
  for (const uint64_t bytes : kSizes) {
    puts.push_back(
        {.source = source + at, .bytes = bytes, .region = region, .signal = signal, .offset = at}
    );
    at += bytes;
  }
  return puts;
}

}  // namespace

// Out of lent memory into the transport's own, and the other way round, and from lent to lent.
// Ranks of a domain do not reach each other's: each puts to one of another.
TEST_P(TransportConformance, CarriesLentMemory) {
  run(
      [step = std::max(GetParam().ranks_per_domain, 1)](Wire& wire) {
        const int to = (wire.rank() + step) % wire.num_ranks();
        const int from = (wire.rank() + wire.num_ranks() - step) % wire.num_ranks();
        std::vector<std::byte> source = make_pattern(wire.rank());
        std::vector<std::byte> target(kBytes);
        const auto lent_source = lend(wire, source);
        const auto lent_target = lend(wire, target);
        require(lent_source.has_value() == lent_target.has_value(), "one of two is taken");
        if (!lent_source || to == wire.rank()) {
          return;
        }
        const std::vector<std::byte> plain = source;
        const auto send = [&](const std::byte* data, uint32_t region, uint64_t count) {
          wire.transport->put(to, puts_of(data, region, 2));
          wire.wait(2, count * std::size(kSizes));
        };
        send(source.data(), wire.slot_of(to), 1);
        require_pattern(wire.own.data, from);
        const auto blocks = wire.group.all_gather(std::as_bytes(std::span(&lent_target->ref, 1)));
        RegionRef there;
        std::memcpy(&there, blocks[static_cast<size_t>(to)].data(), sizeof there);
        wire.transport->import(to, there);
        send(plain.data(), there.slot, 2);
        require_pattern(target.data(), from);
        wire.group.barrier();
        std::fill(target.begin(), target.end(), std::byte{0});
        wire.group.barrier();
        send(source.data(), there.slot, 3);
        require_pattern(target.data(), from);
        wire.group.barrier();
        wire.transport->release(lent_source->ref);
        wire.transport->release(lent_target->ref);
      },
      kBytes
  );
}

// Neighbouring puts, of which some come out of lent memory.
TEST_P(TransportConformance, MixesLentAndOtherSources) {
  run(
      [](Wire& wire) {
        const std::vector<std::byte> plain = make_pattern(wire.rank());
        std::vector<std::byte> memory = plain;
        const auto lent = lend(wire, memory);
        const std::byte* const second = lent ? memory.data() : plain.data();
        std::vector<Put> puts = puts_of(plain.data(), wire.slot_of(wire.next()), 3);
        for (size_t i = 0; i < puts.size(); i += 2) {
          puts[i].source = second + puts[i].offset;
        }
        wire.transport->put(wire.next(), puts);
        wire.wait(3, puts.size());
        require_pattern(wire.own.data, wire.previous());
        wire.group.barrier();
        if (lent) {
          wire.transport->release(lent->ref);
        }
      },
      kBytes
  );
}

}  // namespace weft::testing
