// SPDX-License-Identifier: Apache-2.0
// Moving bytes and counting them. Life and death of peers: transport_life.cpp.
#include "conformance/transport_conformance.hpp"

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "weft/error.hpp"

namespace weft::testing {
namespace {

// A byte that depends on who wrote it and where.
std::byte pattern(int from, uint64_t i) {
  return static_cast<std::byte>((static_cast<uint64_t>(from) * 131 + i * 7 + (i >> 8)) & 0xff);
}

std::vector<std::byte> make_pattern(int from, uint64_t bytes) {
  std::vector<std::byte> block(bytes);
  for (uint64_t i = 0; i < bytes; ++i) {
    block[i] = pattern(from, i);
  }
  return block;
}

void require_pattern(const std::byte* data, int from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (data[i] != pattern(from, i)) {  // the text is made only for a fault
      require(false, fmt::format("byte {} of {} from rank {} is wrong", i, bytes, from));
    }
  }
}

}  // namespace

TEST_P(TransportConformance, StartsWithZeroSignals) {
  run([](Wire& wire) {
    for (uint32_t signal = 0; signal < Wire::kNumSignals; ++signal) {
      require(wire.transport->signal_value(signal) == 0, "a signal starts above zero");
    }
    require(reinterpret_cast<uintptr_t>(wire.own.data) % 64 == 0, "a region is not aligned");
  });
}

TEST_P(TransportConformance, ShowsTheBytesOnceTheSignalGrew) {
  constexpr uint64_t kBytes = 300;
  run([](Wire& wire) {
    const auto block = make_pattern(wire.rank(), kBytes);
    for (int peer = 0; peer < wire.num_ranks(); ++peer) {  // itself included
      const Put put = {
          .source = block.data(),
          .bytes = kBytes,
          .region = wire.slot_of(peer),
          .signal = static_cast<uint32_t>(wire.rank()),
          .offset = kBytes * static_cast<uint64_t>(wire.rank())};
      wire.transport->put(peer, std::span(&put, 1));
    }
    for (int peer = 0; peer < wire.num_ranks(); ++peer) {
      wire.wait(static_cast<uint32_t>(peer), 1);
      require_pattern(wire.own.data + kBytes * static_cast<uint64_t>(peer), peer, kBytes);
    }
  });
}

TEST_P(TransportConformance, CountsEverySmallPut) {
  constexpr uint64_t kRowBytes = 16;
  constexpr uint32_t kRows = 256;
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  run(
      [seed](Wire& wire) {
        const auto block = make_pattern(wire.rank(), kRowBytes * kRows);
        std::mt19937 random(seed + static_cast<uint32_t>(wire.rank()));
        std::vector<Put> batch;
        std::vector<uint64_t> sent(2);
        for (uint32_t row = 0; row < kRows; ++row) {
          const auto signal = static_cast<uint32_t>(random() % 2);
          ++sent[signal];
          batch.push_back(
              {.source = block.data() + row * kRowBytes,
               .bytes = kRowBytes,
               .region = wire.slot_of(wire.next()),
               .signal = signal,
               .offset = row * kRowBytes}
          );
          if (random() % 8 == 0 || row + 1 == kRows) {
            wire.transport->put(wire.next(), batch);
            batch.clear();
          }
        }
        // How many puts each signal covers, told apart from the puts themselves.
        wire.transport->raise(wire.next(), 2, sent[0] + 1);
        wire.wait(2, 1);
        const uint64_t on_first = wire.transport->signal_value(2) - 1;
        wire.wait(0, on_first);
        wire.wait(1, kRows - on_first);
        require_pattern(wire.own.data, wire.previous(), kRowBytes * kRows);
        require(wire.transport->signal_value(0) == on_first, "signal 0 counted too much");
        require(wire.transport->signal_value(1) == kRows - on_first, "signal 1 counted too much");
      },
      kRowBytes * kRows
  );
}

TEST_P(TransportConformance, CountsAPutOfNoBytes) {
  run([](Wire& wire) {
    const Put put = {
        .source = nullptr,
        .bytes = 0,
        .region = wire.slot_of(wire.next()),
        .signal = 3,
        .offset = wire.own.ref.bytes};  // the end itself is inside for no bytes
    wire.transport->put(wire.next(), std::vector<Put>(5, put));
    wire.wait(3, 5);
    wire.transport->put(wire.next(), {});  // no put at all
  });
}

TEST_P(TransportConformance, LetsSeveralThreadsPut) {
  constexpr int kThreads = 3;
  constexpr int kPutsPerThread = 100;
  run([](Wire& wire) {
    const auto block = make_pattern(wire.rank(), kThreads * kPutsPerThread);
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&wire, &block, thread] {
          for (int i = 0; i < kPutsPerThread; ++i) {
            const auto at = static_cast<uint64_t>(thread * kPutsPerThread + i);
            const Put put = {
                .source = block.data() + at,
                .bytes = 1,
                .region = wire.slot_of(wire.next()),
                .signal = 0,
                .offset = at};
            wire.transport->put(wire.next(), std::span(&put, 1));
          }
        });
      }
    }
    wire.wait(0, kThreads * kPutsPerThread);
    require_pattern(wire.own.data, wire.previous(), kThreads * kPutsPerThread);
  });
}

TEST_P(TransportConformance, MovesALargeRegion) {
  constexpr uint64_t kBytes = (uint64_t{3} << 20) + 5;
  constexpr uint64_t kOffset = 3;  // nothing is aligned
  run(
      [](Wire& wire) {
        const auto block = make_pattern(wire.rank(), kBytes);
        const Put put = {
            .source = block.data(),
            .bytes = kBytes,
            .region = wire.slot_of(wire.next()),
            .signal = 1,
            .offset = kOffset};
        wire.transport->put(wire.next(), std::span(&put, 1));
        wire.wait(1, 1);
        require_pattern(wire.own.data + kOffset, wire.previous(), kBytes);
      },
      kBytes + kOffset
  );
}

TEST_P(TransportConformance, CountsBeyond32Bits) {
  constexpr uint64_t kAmount = (uint64_t{1} << 33) + 5;
  run([](Wire& wire) {
    wire.transport->raise(wire.next(), Wire::kNumSignals - 1, kAmount);
    wire.transport->raise(wire.next(), Wire::kNumSignals - 1, kAmount);
    wire.wait(Wire::kNumSignals - 1, 2 * kAmount);
    require(wire.transport->signal_value(Wire::kNumSignals - 1) == 2 * kAmount, "counted too much");
  });
}

TEST_P(TransportConformance, ShowsStoresThroughMappedAfterARaise) {
  constexpr uint64_t kBytes = 1000;
  run([](Wire& wire) {
    std::byte* target = wire.transport->mapped(wire.next(), wire.slot_of(wire.next()));
    const auto block = make_pattern(wire.rank(), kBytes);
    if (target != nullptr) {
      std::memcpy(target, block.data(), kBytes);
      wire.transport->raise(wire.next(), 4, 1);
    } else {  // legal: then put() is the only way
      const Put put = {
          .source = block.data(),
          .bytes = kBytes,
          .region = wire.slot_of(wire.next()),
          .signal = 4};
      wire.transport->put(wire.next(), std::span(&put, 1));
    }
    wire.wait(4, 1);
    require_pattern(wire.own.data, wire.previous(), kBytes);
    require(wire.transport->mapped(wire.next(), 4095) == nullptr, "an unknown region is mapped");
  });
}

TEST_P(TransportConformance, ReusesASlotWithANewGeneration) {
  constexpr uint64_t kRounds = 5;
  run([](Wire& wire) {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      const RegionRef old = wire.own.ref;
      const std::vector<RegionRef> old_refs = wire.refs;
      wire.transport->release(old);
      wire.group.barrier();
      require_refusal(
          [&] { wire.transport->import(wire.next(), old_refs[static_cast<size_t>(wire.next())]); },
          "is not allocated there"
      );
      wire.group.barrier();
      const uint64_t bytes = 4096 * (round % 3 + 1);  // grows and shrinks
      wire.share(wire.transport->allocate(bytes));
      require(wire.own.ref.slot == old.slot, "the slot was not used again");
      require(wire.own.ref.generation != old.generation, "the generation did not change");
      const auto block = make_pattern(wire.rank(), bytes);
      const Put put = {
          .source = block.data(),
          .bytes = bytes,
          .region = wire.slot_of(wire.next()),
          .signal = 0,
          .offset = 0};
      wire.transport->put(wire.next(), std::span(&put, 1));
      wire.wait(0, round);
      require_pattern(wire.own.data, wire.previous(), bytes);
      wire.group.barrier();
    }
  });
}

TEST_P(TransportConformance, ImportsTheSameRegionAgain) {
  run([](Wire& wire) {
    for (int again = 0; again < 3; ++again) {
      wire.transport->import(wire.next(), wire.refs[static_cast<size_t>(wire.next())]);
    }
    const auto block = make_pattern(wire.rank(), 8);
    const Put put = {
        .source = block.data(), .bytes = 8, .region = wire.slot_of(wire.next()), .signal = 0};
    wire.transport->put(wire.next(), std::span(&put, 1));
    wire.wait(0, 1);
    require_pattern(wire.own.data, wire.previous(), 8);
  });
}

TEST_P(TransportConformance, RefusesAPutThatDoesNotFit) {
  if (!GetParam().refuses_at_once) {
    GTEST_SKIP() << "this transport reports a wrong put later";
  }
  run([](Wire& wire) {
    Transport& transport = *wire.transport;
    const uint64_t bytes = wire.own.ref.bytes;
    const auto block = make_pattern(wire.rank(), bytes + 1);
    const Put good = {
        .source = block.data(), .bytes = 1, .region = wire.slot_of(wire.next()), .signal = 0};
    const auto refuse = [&](Put wrong, const std::string& text) {
      const std::vector<Put> puts = {good, wrong};  // the good one must not go either
      require_refusal([&] { transport.put(wire.next(), puts); }, text);
    };
    Put wrong = good;
    wrong.bytes = bytes + 1;
    refuse(wrong, fmt::format("put: {} B at offset 0 end past region {}", bytes + 1, good.region));
    wrong = good;
    wrong.offset = bytes;
    refuse(wrong, fmt::format("put: 1 B at offset {} end past region", bytes));
    wrong.offset = std::numeric_limits<uint64_t>::max();
    refuse(wrong, "end past region");
    wrong = good;
    wrong.region = 77;
    refuse(wrong, fmt::format("put: region 77 of rank {} is not imported", wire.next()));
    wrong = good;
    wrong.signal = Wire::kNumSignals;
    refuse(wrong, fmt::format("put: signal 16 of rank {} is out of range", wire.next()));
    require_refusal([&] { transport.put(wire.num_ranks(), {}); }, "is out of range (num_ranks = ");
    wire.group.barrier();
    require(transport.signal_value(0) == 0, "a refused call raised a signal");
    wire.group.barrier();
    transport.put(wire.next(), std::span(&good, 1));
    wire.wait(0, 1);
  });
}

TEST_P(TransportConformance, RefusesToReleaseTwice) {
  run([](Wire& wire) {
    const Region extra = wire.transport->allocate(64);
    wire.transport->release(extra.ref);
    require_refusal([&] { wire.transport->release(extra.ref); }, "release: region ");
    try {
      static_cast<void>(wire.transport->allocate(uint64_t{1} << 50));
      require(false, "a petabyte was allocated");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kOutOfMemory, error.what());
    }
  });
}

}  // namespace weft::testing
