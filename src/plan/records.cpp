// SPDX-License-Identifier: Apache-2.0
// Arrival records as bytes: what a source tells a receiver in addition to the payload.
//
//   u32 num_arrivals, u32 num_routes, u32 flags (1: one row, 2: weights), u32 zero
//   i32 token[num_arrivals], i32 slot[num_routes], i32 expert[num_routes], f32 weight[num_routes]
//   (flag 2), u8 k[num_routes], u8 routes of the arrival[num_arrivals]
//
// A bundle: for each receiver u64 length, then its records.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "plan/build.hpp"

namespace weft {
namespace {

static_assert(std::endian::native == std::endian::little);

struct Header {
  uint32_t num_arrivals = 0;
  uint32_t num_routes = 0;
  uint32_t flags = 0;
  uint32_t zero = 0;
};
constexpr uint32_t kOneRow = 1;
constexpr uint32_t kWeights = 2;
constexpr uint64_t kBytesPerArrival = sizeof(int32_t) + 1;
constexpr uint64_t kBytesPerRoute = 2 * sizeof(int32_t) + 1;

uint64_t record_bytes(const Header& header) {
  const uint64_t weight_bytes = (header.flags & kWeights) != 0 ? sizeof(float) : 0;
  return sizeof(Header) + header.num_arrivals * kBytesPerArrival +
         header.num_routes * (kBytesPerRoute + weight_bytes);
}

template <class T>
void write(std::byte*& at, const std::vector<T>& values) {
  at = std::ranges::copy(std::as_bytes(std::span(values)), at).out;
}

template <class T>
void read(const std::byte*& at, std::vector<T>& values, size_t count) {
  values.resize(count);
  const auto bytes = std::as_writable_bytes(std::span(values));
  std::copy_n(at, bytes.size(), bytes.begin());
  at += bytes.size();
}

template <class... Args>
[[noreturn]] void refuse(
    int source_rank, const Context& context, fmt::format_string<Args...> format, Args&&... args
) {
  const std::string fault = fmt::format(format, std::forward<Args>(args)...);
  WEFT_RAISE(
      context,
      ErrorCode::kTransport,
      "plan: records of rank {} are malformed: {}",
      source_rank,
      fault
  );
}

}  // namespace

uint64_t max_record_bytes(int64_t max_tokens, int max_topk) {
  const auto tokens = static_cast<uint64_t>(max_tokens);
  const uint64_t routes = tokens * static_cast<uint64_t>(max_topk);
  return sizeof(Header) + tokens * kBytesPerArrival + routes * (kBytesPerRoute + sizeof(float));
}

std::vector<std::byte> encode_records(const Arrivals& arrivals) {
  Header header;
  header.num_arrivals = static_cast<uint32_t>(arrivals.token.size());
  header.num_routes = static_cast<uint32_t>(arrivals.slot.size());
  header.flags = (arrivals.one_row ? kOneRow : 0) | (arrivals.weight.empty() ? 0 : kWeights);

  std::vector<std::byte> bytes(record_bytes(header));
  std::byte* at = bytes.data();
  std::memcpy(at, &header, sizeof(header));
  at += sizeof(header);
  write(at, arrivals.token);
  write(at, arrivals.slot);
  write(at, arrivals.expert);
  write(at, arrivals.weight);
  for (const int32_t k : arrivals.k) {
    *at++ = static_cast<std::byte>(k);
  }
  for (size_t i = 0; i < arrivals.token.size(); ++i) {
    *at++ = static_cast<std::byte>(arrivals.route_begin[i + 1] - arrivals.route_begin[i]);
  }
  return bytes;
}

Arrivals decode_records(
    std::span<const std::byte> bytes,
    const ArrivalBounds& bounds,
    int source_rank,
    const Context& context
) {
  Header header;
  if (bytes.size() < sizeof(header)) {
    refuse(source_rank, context, "{} B (a header has {})", bytes.size(), sizeof(header));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();
  if (header.num_arrivals > kMost || header.num_routes > kMost || header.zero != 0 ||
      (header.flags & ~(kOneRow | kWeights)) != 0) {
    refuse(source_rank, context, "the header holds impossible values");
  }
  if (bytes.size() != record_bytes(header)) {
    refuse(
        source_rank,
        context,
        "{} B ({} arrivals with {} routes take {})",
        bytes.size(),
        header.num_arrivals,
        header.num_routes,
        record_bytes(header)
    );
  }

  Arrivals arrivals;
  arrivals.one_row = (header.flags & kOneRow) != 0;
  const std::byte* at = bytes.data() + sizeof(header);
  read(at, arrivals.token, header.num_arrivals);
  read(at, arrivals.slot, header.num_routes);
  read(at, arrivals.expert, header.num_routes);
  read(at, arrivals.weight, (header.flags & kWeights) != 0 ? header.num_routes : 0);
  arrivals.k.resize(header.num_routes);
  for (int32_t& k : arrivals.k) {
    k = static_cast<int32_t>(*at++);
  }
  arrivals.route_begin = {0};
  for (size_t i = 0; i < arrivals.token.size(); ++i) {
    arrivals.route_begin.push_back(arrivals.route_begin.back() + static_cast<int32_t>(*at++));
  }
  if (const std::string fault = arrivals_fault(arrivals, bounds); !fault.empty()) {
    refuse(source_rank, context, "{}", fault);
  }
  return arrivals;
}

std::vector<std::byte> bundle_records(std::span<const std::vector<std::byte>> records) {
  std::vector<std::byte> bundle;
  for (const std::vector<std::byte>& one : records) {
    const uint64_t length = one.size();
    const auto* begin = reinterpret_cast<const std::byte*>(&length);
    bundle.insert(bundle.end(), begin, begin + sizeof length);
    bundle.insert(bundle.end(), one.begin(), one.end());
  }
  return bundle;
}

std::vector<std::span<const std::byte>> unbundle_records(
    std::span<const std::byte> bundle, size_t num_receivers, int source_rank, const Context& context
) {
  std::vector<std::span<const std::byte>> records;
  for (size_t i = 0; i < num_receivers; ++i) {
    uint64_t length = 0;
    if (bundle.size() < sizeof length) {
      refuse(source_rank, context, "they end before receiver {} of {}", i, num_receivers);
    }
    std::memcpy(&length, bundle.data(), sizeof length);
    bundle = bundle.subspan(sizeof length);
    if (bundle.size() < length) {
      refuse(
          source_rank, context, "receiver {} has {} B ({} B are left)", i, length, bundle.size()
      );
    }
    records.push_back(bundle.first(length));
    bundle = bundle.subspan(length);
  }
  if (!bundle.empty()) {
    refuse(source_rank, context, "{} B follow those of {} receivers", bundle.size(), num_receivers);
  }
  return records;
}

// A token has at most one arrival on each receiver, and none without a route.
uint64_t max_bundle_bytes(int64_t max_tokens, int max_topk, int num_receivers) {
  const auto tokens = static_cast<uint64_t>(max_tokens);
  const auto receivers = static_cast<uint64_t>(num_receivers);
  const auto topk = static_cast<uint64_t>(max_topk);
  return receivers * (sizeof(uint64_t) + sizeof(Header)) +
         tokens * std::min(receivers, topk) * kBytesPerArrival +
         tokens * topk * (kBytesPerRoute + sizeof(float));
}

namespace {

std::string sizes_fault(const Arrivals& a) {
  const size_t routes = a.slot.size();
  if (a.route_begin.size() != a.token.size() + 1 || a.k.size() != routes ||
      a.expert.size() != routes || (!a.weight.empty() && a.weight.size() != routes)) {
    return fmt::format(
        "{} tokens, {} route_begins, {} slots, {} ks, {} experts and {} weights do not fit",
        a.token.size(),
        a.route_begin.size(),
        routes,
        a.k.size(),
        a.expert.size(),
        a.weight.size()
    );
  }
  if (a.route_begin.front() != 0 || a.route_begin.back() != static_cast<int64_t>(routes)) {
    return fmt::format(
        "route_begin runs from {} to {} (0 to {})",
        a.route_begin.front(),
        a.route_begin.back(),
        routes
    );
  }
  return {};
}

bool is_in(int64_t value, int64_t end) {
  return value >= 0 && value < end;
}

// Says what is wrong with route `r` of the arrival whose routes begin with `first`.
std::string route_fault(const Arrivals& a, const ArrivalBounds& bounds, size_t r, size_t first) {
  static constexpr const char kText[] = "{}[{}] = {} is out of range ({} = {})";
  if (!is_in(a.slot[r], bounds.num_rows)) {
    return fmt::format(kText, "slot", r, a.slot[r], "num_rows", bounds.num_rows);
  }
  if (!is_in(a.k[r], bounds.topk)) {
    return fmt::format(kText, "k", r, a.k[r], "topk", bounds.topk);
  }
  if (const int end = bounds.num_local_experts; !is_in(a.expert[r], end)) {
    return fmt::format(kText, "expert", r, a.expert[r], "num_local_experts", end);
  }
  if (a.one_row && a.slot[r] != a.slot[first]) {
    return fmt::format("slot[{}] = {} (its arrival has row {})", r, a.slot[r], a.slot[first]);
  }
  if (!a.one_row && r > first && a.slot[r] <= a.slot[r - 1]) {
    return fmt::format("slot[{}] = {} does not ascend (after {})", r, a.slot[r], a.slot[r - 1]);
  }
  return fmt::format("k[{}] = {} comes twice in its arrival", r, a.k[r]);
}

}  // namespace

// Text is made only for a route that is at fault: this runs on every record that arrives.
std::string arrivals_fault(const Arrivals& a, const ArrivalBounds& bounds) {
  if (a.one_row != bounds.one_row) {
    return fmt::format("one_row is {} (the layout says otherwise)", a.one_row);
  }
  if (std::string fault = sizes_fault(a); !fault.empty()) {
    return fault;
  }
  int64_t next = 0;
  for (size_t i = 0; i < a.token.size(); ++i) {
    const int64_t begin = a.route_begin[i];
    const int64_t end = a.route_begin[i + 1];
    if (a.token[i] < next || a.token[i] >= bounds.num_tokens) [[unlikely]] {
      return fmt::format(
          "token[{}] = {} is out of order or range ({} to {})",
          i,
          a.token[i],
          next,
          bounds.num_tokens - 1
      );
    }
    if (end <= begin || end - begin > bounds.topk || end > a.num_routes()) [[unlikely]] {
      return fmt::format(
          "arrival {} has routes {} to {} (1 to topk = {} of them)", i, begin, end, bounds.topk
      );
    }
    next = int64_t{a.token[i]} + 1;
    // Slots ascend, or all routes share one; each k comes once.
    const auto first = static_cast<size_t>(begin);
    uint64_t seen = 0;
    for (size_t r = first; r < static_cast<size_t>(end); ++r) {
      const bool is_sound =
          is_in(a.slot[r], bounds.num_rows) && is_in(a.k[r], bounds.topk) &&
          is_in(a.expert[r], bounds.num_local_experts) && (seen >> a.k[r] & 1) == 0 &&
          (a.one_row ? a.slot[r] == a.slot[first] : r == first || a.slot[r] > a.slot[r - 1]);
      if (!is_sound) [[unlikely]] {
        return route_fault(a, bounds, r, first);
      }
      seen |= uint64_t{1} << a.k[r];
    }
  }
  return {};
}

}  // namespace weft
