// SPDX-License-Identifier: Apache-2.0
// The push role of dispatch: a team of warps takes a chunk of this rank's tokens, loads each row
// once and stores it to one place on every other rank that it goes to and to every slot on this
// rank; then weights and scales, then a signal to each rank.
//
// Before: device/call_setup.cuh, which has the addresses. After: the fan-out role of the receiver
// (fan_out.cuh, or eager.cuh in a launch that also makes the plan).
#pragma once

#include "cuda/device/row_mover.cuh"
#include "cuda/device/team.cuh"
#include "cuda/dispatch/quantise.cuh"
#include "cuda/dispatch/routes.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// `Routes`: PlannedRoutes, EagerRoutes or BalancedRoutes.
template <class Routes>
class DispatchPush {
 public:
  __device__ DispatchPush(
      const DispatchLaunch& call, const CallSetup& setup, TeamProgress& progress, RoleBlock block
  )
      : call_(call),
        setup_(setup),
        me_(call.me),
        progress_(progress),
        block_(block),
        routes_(call),
        peer_(peer_of_lane(call.me)) {
    num_tokens_ = routes_.num_tokens();
    chunk_tokens_ = chunk_tokens(num_tokens_);
    num_chunks_ = num_device_chunks(num_tokens_);
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    const int most = team_warps(call.payload.row_bytes, num_tokens_);
    const bool is_waited_for =
        call.me.num_ranks > 1 && !(call.one_row && call.place == Place::kPrimarySlot);
    const bool is_hurried = Routes::kIsEager || is_waited_for;
    const int warps = is_hurried ? most : least_team_warps(most, num_chunks_, block.count);
    chunk_shift_ = __ffs(chunk_tokens_) - 1;
    team_ = make_team(warps, block.index, block.count);
  }

  __device__ void run(const VectorMover& /*mover*/) {
    const Slice slice = slice_of(team_, call_.payload.row_bytes, kVectorPiece);
    const int chunks = num_own_chunks();
    Chunk next = chunks > 0 ? load_chunk(0) : Chunk{};
    for (int n = 0; n < chunks; ++n) {
      const Chunk routes = next;
      if (n + 1 < chunks) {
        next = load_chunk(n + 1);
      }
      const int begin = chunk_at(n) * chunk_tokens_;
      const int count = min(chunk_tokens_, num_tokens_ - begin);
      if (!call_.payload.is_quantised()) {
        for (int piece = 0; piece < slice.pieces.count; ++piece) {
          move_chunk_piece(slice, piece, begin, count, routes);
        }
      }
      for (int i = 0; i < count; ++i) {
        const TokenRoutes token_routes = routes_.at(routes, i);
        if (call_.payload.is_quantised()) {
          quantise_row(
              call_,
              row_of(begin + i),
              quantise_span(call_.payload.row_bytes, team_.warp, team_.warps),
              targets_of(token_routes),
              scale_targets_of(token_routes)
          );
        }
        move_extras(begin + i, token_routes);
      }
      report_progress(progress_, team_, static_cast<uint32_t>(n) + 1);
    }
  }

  __device__ void run(BulkRing& ring) {
    const Slice slice = slice_of(team_, call_.payload.row_bytes, kBulkPiece);
    const Pieces& pieces = slice.pieces;
    const int chunks = num_own_chunks();
    const int tokens = num_own_tokens(chunks);
    Chunk next = chunks > 0 ? load_chunk(0) : Chunk{};
    Chunk routes{};
    Targets targets;
    int index = 0;  // of the token being stored
    int piece = 0;
    int load_index = 0;
    int load_piece = 0;
    const auto source = [&](int) -> RowSpan {
      const RowSpan span = {
          row_of(token_at(load_index)) + slice.offset + load_piece * pieces.each,
          static_cast<uint32_t>(pieces.bytes(load_piece))};
      if (++load_piece == pieces.count) {
        load_piece = 0;
        ++load_index;
      }
      return span;
    };
    const auto store = [&](int, const std::byte* data) {
      if (piece == 0) {
        const int in_chunk = index & (chunk_tokens_ - 1);
        if (in_chunk == 0) {
          routes = next;
          const int n = (index >> chunk_shift_) + 1;
          if (n < chunks) {
            next = load_chunk(n);
          }
        }
        const TokenRoutes token_routes = routes_.at(routes, in_chunk);
        targets = targets_of(token_routes);
        move_extras(token_at(index), token_routes);
      }
      const int32_t offset = slice.offset + piece * pieces.each;
      const auto bytes = static_cast<uint32_t>(pieces.bytes(piece));
      if (targets.first != nullptr) {
        ptx::bulk_store(targets.first + offset, data, bytes);
      }
      if (targets.second != nullptr) {
        ptx::bulk_store(targets.second + offset, data, bytes);
      }
    };
    const auto after = [&](int) {
      if (++piece < pieces.count) {
        return;
      }
      piece = 0;
      ++index;
      if ((index & (chunk_tokens_ - 1)) == 0) {
        ptx::wait_stores<kPatience>();  // the last piece may be on its way
        report_progress(progress_, team_, static_cast<uint32_t>(index >> chunk_shift_) - 1);
      }
    };
    if (ring.stream(tokens * pieces.count, source, store, after)) {
      ptx::wait_stores<0>();
      report_progress(progress_, team_, static_cast<uint32_t>(chunks));
    }
  }

  // Raises, by the block's last warp, the signals: lane r those at rank r.
  __device__ void run_signals() const {
    const bool is_telling = lane_index() < me_.num_ranks && !is_lost(me_, lane_index());
    const auto first = [&](int in_block) {
      return team_index(block_.index, block_.count, in_block);
    };
    const auto chunks_of = [&](int in_block) -> uint32_t {
      return static_cast<uint32_t>(count_from(first(in_block), team_.count, num_chunks_));
    };
    signal_chunks(
        me_,
        progress_,
        kMoverWarps / team_.warps,
        team_.warps,
        chunks_of,
        [&](int in_block, int n) {
          if (is_telling) {
            const int chunk = first(in_block) + n * team_.count;
            const auto slot = me_.map.signals().dispatch(me_.rank, chunk);
            ptx::store_relaxed_sys(setup_.signals[lane_index()] + slot, setup_.epoch);
          }
        }
    );
  }

 private:
  // Pieces that a warp leaves on their way at the end of a chunk. A guess; few, because links that
  // are offered more carry less.
  static constexpr int kPatience = 1;

  using Chunk = typename Routes::Chunk;

  [[nodiscard]] __device__ __forceinline__ int num_own_chunks() const {
    return count_from(team_.index, team_.count, num_chunks_);
  }
  [[nodiscard]] __device__ __forceinline__ int num_own_tokens(int chunks) const {
    const bool has_last = chunks > 0 && chunk_at(chunks - 1) == num_chunks_ - 1;
    return chunks * chunk_tokens_ - (has_last ? num_chunks_ * chunk_tokens_ - num_tokens_ : 0);
  }
  // Return the team's n-th chunk and token.
  [[nodiscard]] __device__ __forceinline__ int chunk_at(int n) const {
    return team_.index + n * team_.count;
  }
  [[nodiscard]] __device__ __forceinline__ int token_at(int n) const {
    const int chunk = n >> chunk_shift_;
    return (chunk_at(chunk) << chunk_shift_) + (n - (chunk << chunk_shift_));
  }
  [[nodiscard]] __device__ __forceinline__ const std::byte* row_of(int token) const {
    return call_.x + static_cast<int64_t>(token) * call_.payload.row_bytes;
  }

  [[nodiscard]] __device__ __forceinline__ Chunk load_chunk(int n) const {
    const int begin = chunk_at(n) * chunk_tokens_;
    return routes_.load(begin, min(chunk_tokens_, num_tokens_ - begin));
  }

  // Moves one piece of every row of a chunk: all loads, then all stores.
  __device__ __forceinline__ void move_chunk_piece(
      const Slice& slice, int piece, int begin, int count, const Chunk& routes
  ) const {
    const int32_t offset = slice.offset + piece * slice.pieces.each;
    const int32_t bytes = slice.pieces.bytes(piece);
    PieceVectors rows[kMaxChunkTokens];
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (i < count) {
        load_vectors(rows[i], row_of(begin + i) + offset, bytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (i < count) {
        for_each_target(targets_of(routes_.at(routes, i)), [&](std::byte* target) {
          store_vectors(target + offset, rows[i], bytes);
        });
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ Targets targets_of(const TokenRoutes& routes) const {
    Targets targets;
    if (routes.primary >= 0 && (Routes::kIsEager || peer_ != me_.rank)) {
      const int64_t row = setup_.place[peer_] == Place::kPrimarySlot
                              ? routes.primary
                              : setup_.first_row[peer_] + routes.arrival;
      targets.first = setup_.rows[peer_] + row * call_.payload.out_row_bytes();
    }
    if (routes.own_slot >= 0) {
      targets.second = call_.out_rows + routes.own_slot * call_.payload.out_row_bytes();
    }
    return targets;
  }

  // Scale rows always go through staging.
  [[nodiscard]] __device__ __forceinline__ std::byte* scale_targets_of(const TokenRoutes& routes
  ) const {
    if (routes.primary < 0 || call_.payload.scale_bytes == 0) {
      return nullptr;
    }
    const int64_t row = setup_.first_row[peer_] + routes.arrival;
    return setup_.scales[peer_] + row * call_.payload.staged_scale_bytes();
  }

  // Moves a token's weights and scale rows to every rank it goes to, this one included. The warps
  // of a team take turns.
  __device__ __forceinline__ void move_extras(int token, const TokenRoutes& routes) const {
    if (token % team_.warps != team_.warp) {
      return;
    }
    if (call_.scales != nullptr) {
      const Targets targets = {scale_targets_of(routes), nullptr};
      const std::byte* row = call_.scales + static_cast<int64_t>(token) * call_.payload.scale_bytes;
      for_each_target(targets, [&](std::byte* target) {
        copy_bytes_warp(target, row, call_.payload.scale_bytes);
      });
    }
    if (call_.weights != nullptr) {
      float* mine = nullptr;
      if (routes.primary >= 0) {
        mine = setup_.weights[peer_] + static_cast<int64_t>(routes.arrival) * max_topk_;
      }
      store_weights(mine, given_weight(call_, call_.weights, token), call_.topk);
    }
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  TeamProgress& progress_;
  RoleBlock block_;
  Routes routes_;
  int peer_;  // of this lane, if it is below num_ranks
  int num_tokens_;
  int chunk_tokens_;
  int chunk_shift_;  // chunk_tokens_ is 1 << this
  int num_chunks_;
  int max_topk_;
  Team team_;
};

}  // namespace weft
