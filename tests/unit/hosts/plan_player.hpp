// SPDX-License-Identifier: Apache-2.0
// Does in plain memory what the kernel of src/cuda/plan/import.cu does: every rank of a domain
// copies its image into its own plan block and into those of its receivers.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <vector>

#include "byte_spans.hpp"
#include "cuda/layout/plan.hpp"
#include "support/memory.hpp"

namespace weft::test {

// Plan image of one rank.
struct ImportedImage {
  int32_t num_tokens = 0;
  std::vector<std::byte> bytes;
  std::vector<ImportedRecords> records;  // [members]
};

class PlanPlayer {
 public:
  explicit PlanPlayer(const PlanMap& map)
      : map_(map),
        blocks_(map.num_ranks, std::vector<std::byte>(map.num_bytes(), kCanary)),
        written_(map.num_ranks) {}

  [[nodiscard]] PlanView block(size_t member) const {
    return {const_cast<std::byte*>(blocks_[member].data()), map_};
  }

  // [members]
  void play(std::span<const ImportedImage> images) {
    for (size_t member = 0; member < images.size(); ++member) {
      copy_own(images[member], member);
      for (size_t to = 0; to < images.size(); ++to) {
        copy_records(images[member], member, to);
      }
      write_counts(images, member);
    }
    for (const std::vector<ByteSpan>& spans : written_) {
      expect_apart(spans, map_.num_bytes());  // the kernel does not say who would be last
    }
  }

 private:
  // Copies whole vectors of 16 bytes, as the kernel does.
  void copy(
      const ImportedImage& from, uint64_t offset, size_t member, uint64_t to, uint64_t num_bytes
  ) {
    const uint64_t bytes = (num_bytes + 15) / 16 * 16;
    ASSERT_EQ(offset % 16, 0U);
    ASSERT_EQ(to % 16, 0U);
    ASSERT_LE(offset + bytes, from.bytes.size());
    ASSERT_LE(to + bytes, map_.num_bytes());
    written_[member].push_back({to, to + bytes});
    std::memcpy(blocks_[member].data() + to, from.bytes.data() + offset, bytes);
  }

  void copy_own(const ImportedImage& image, size_t member) {
    const auto copy_array = [&](uint64_t offset, uint64_t num_bytes) {
      copy(image, offset, member, offset, num_bytes);
    };
    const auto tokens = static_cast<uint64_t>(image.num_tokens);
    copy_array(map_.rows_per_expert, map_.global_routes - map_.rows_per_expert);
    copy_array(map_.route_expert, sizeof(int32_t) * tokens * map_.max_topk);
    copy_array(map_.route_slot, sizeof(int32_t) * tokens * map_.max_topk);
    copy_array(map_.route_weight, sizeof(float) * tokens * map_.max_topk);
    copy_array(map_.primary, sizeof(int32_t) * tokens * map_.num_ranks);
    copy_array(map_.arrival, sizeof(int32_t) * tokens * map_.num_ranks);
  }

  void copy_records(const ImportedImage& image, size_t member, size_t to) {
    const auto source = static_cast<uint32_t>(member);
    const ImportedRecords& records = image.records[to];
    const auto arrivals = static_cast<uint64_t>(records.num_arrivals);
    const uint64_t routes = arrivals * map_.max_topk;
    const auto chunks = static_cast<uint64_t>(num_device_chunks(image.num_tokens));
    const uint64_t begins = sizeof(int32_t) * (chunks + 1);
    copy(image, records.chunk_begin, to, map_.chunk_begin(source), begins);
    copy(image, records.heads, to, map_.heads(source), sizeof(ArrivalHead) * arrivals);
    copy(image, records.slots, to, map_.slots(source), sizeof(int32_t) * routes);
    copy(image, records.weights, to, map_.weights(source), sizeof(float) * routes);
    copy(image, records.origins, to, map_.origins(source), sizeof(int32_t) * routes);
  }

  // From what the words of all ranks say.
  void write_counts(std::span<const ImportedImage> images, size_t member) {
    const PlanView plan = block(member);
    int32_t received = 0;
    for (size_t rank = 0; rank < images.size(); ++rank) {
      plan.tokens_of()[rank] = images[rank].num_tokens;
      plan.received()[rank] = images[rank].records[member].num_arrivals;
      plan.received_base()[rank] = received;
      received += plan.received()[rank];
      plan.arrival_base()[rank] = 0;
      for (size_t source = 0; source < member; ++source) {
        plan.arrival_base()[rank] += images[source].records[rank].num_arrivals;
      }
    }
    std::memcpy(plan.data, images[member].bytes.data(), sizeof(PlanHeader));
  }

  PlanMap map_;
  std::vector<std::vector<std::byte>> blocks_;  // [members]
  std::vector<std::vector<ByteSpan>> written_;  // by a copy
};

}  // namespace weft::test
