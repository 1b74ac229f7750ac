// SPDX-License-Identifier: Apache-2.0
// The push role of dispatch: a warp takes a chunk of this rank's tokens, loads each row once and
// stores it to one place on every other rank it goes to and to every slot on this rank; then
// weights and scales, then a signal to each rank. Warps are on their own: none waits for another.
#pragma once

#include "kernels/launch.hpp"
#include "kernels/quantise.cuh"
#include "kernels/row_mover.cuh"

namespace weft {

// Where one token goes, spread over the lanes: lane r knows rank r, lane k route k.
struct TokenRoutes {
  int32_t primary = -1;   // slot on rank `lane`
  int32_t arrival = -1;   // number of the arrival there
  int32_t own_slot = -1;  // slot of route `lane` if its expert is this rank's
};

class DispatchPush {
 public:
  __device__ DispatchPush(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup), me_(call.me) {
    const PlanView& plan = call.plan;
    num_tokens_ = plan.header()->num_tokens;
    chunk_tokens_ = chunk_tokens(num_tokens_);
    num_chunks_ = num_device_chunks(num_tokens_);
    local_experts_ = static_cast<int>(me_.map.num_experts) / me_.num_ranks;
    max_topk_ = static_cast<int>(plan.map.max_topk);
    first_chunk_ = static_cast<int>(blockIdx.x) + warp_in_block() * call.num_push;
    chunk_step_ = static_cast<int>(blockDim.x) / kWarpLanes * call.num_push;
  }

  __device__ void run_vector() {
    const Pieces pieces = cut_row(call_.row_bytes, kVectorPiece);
    for (int chunk = first_chunk_; chunk < num_chunks_; chunk += chunk_step_) {
      const int begin = chunk * chunk_tokens_;
      const int end = min(begin + chunk_tokens_, num_tokens_);
      for (int token = begin; token < end; ++token) {
        const TokenRoutes routes = routes_of(token);
        const Targets targets = targets_of(routes);
        const std::byte* row = call_.x + static_cast<int64_t>(token) * call_.row_bytes;
        if (call_.quantise == Quantise::kNone) {
          for (int piece = 0; piece < pieces.count; ++piece) {
            move_piece(row, piece * pieces.each, pieces.bytes(piece), targets);
          }
        } else {
          quantise_row(call_.quantise, row, call_.row_bytes, targets, scale_targets_of(routes));
        }
        move_extras(token, routes);
      }
      __syncwarp();
      signal(chunk);
    }
  }

#if __CUDA_ARCH__ >= 900
  __device__ void run_bulk(BulkRing& ring) {
    const Pieces pieces = cut_row(call_.row_bytes, kBulkPiece);
    const int tokens = num_own_tokens();
    TokenRoutes next = tokens > 0 ? routes_of(token_at(0)) : TokenRoutes{};
    TokenRoutes routes;
    Targets targets;
    int pending = -1;  // chunk whose stores are on their way, and after how many units to look
    int patience = 0;
    int index = 0;  // of the token being stored
    int piece = 0;
    int load_index = 0;
    int load_piece = 0;
    const auto source = [&](int) -> RowSpan {
      const std::byte* row = call_.x + static_cast<int64_t>(token_at(load_index)) * call_.row_bytes;
      const RowSpan span = {
          row + load_piece * pieces.each, static_cast<uint32_t>(pieces.bytes(load_piece))};
      if (++load_piece == pieces.count) {
        load_piece = 0;
        ++load_index;
      }
      return span;
    };
    const auto store = [&](int, const std::byte* data) {
      if (piece == 0) {
        routes = next;
        targets = targets_of(routes);
        if (index + 1 < tokens) {
          next = routes_of(token_at(index + 1));
        }
        move_extras(token_at(index), routes);
      }
      const int32_t offset = piece * pieces.each;
      const auto bytes = static_cast<uint32_t>(pieces.bytes(piece));
      if (targets.first != nullptr) {
        ptx::bulk_store(targets.first + offset, data, bytes);
      }
      if (targets.second != nullptr) {
        ptx::bulk_store(targets.second + offset, data, bytes);
      }
    };
    const auto after = [&](int) {
      if (pending >= 0 && --patience == 0) {
        ptx::wait_stores<kPatience>();
        __syncwarp();
        signal(pending);
        pending = -1;
      }
      if (++piece < pieces.count) {
        return;
      }
      piece = 0;
      const int token = token_at(index++);
      if (index == tokens || token % chunk_tokens_ == chunk_tokens_ - 1) {
        if (pending >= 0) {
          ptx::wait_stores<1>();
          __syncwarp();
          signal(pending);
        }
        pending = token / chunk_tokens_;
        patience = kPatience;
      }
    };
    ring.stream(tokens * pieces.count, source, store, after);
    ptx::wait_stores<0>();
    __syncwarp();
    if (pending >= 0) {
      signal(pending);
    }
  }
#endif

 private:
  // A chunk is signalled once so many later pieces are under way: its own have arrived by then.
  static constexpr int kPatience = 2;

  [[nodiscard]] __device__ __forceinline__ int num_own_tokens() const {
    if (first_chunk_ >= num_chunks_) {
      return 0;
    }
    const int chunks = (num_chunks_ - 1 - first_chunk_) / chunk_step_ + 1;
    const int last = first_chunk_ + (chunks - 1) * chunk_step_;
    const int missing = last == num_chunks_ - 1 ? num_chunks_ * chunk_tokens_ - num_tokens_ : 0;
    return chunks * chunk_tokens_ - missing;
  }

  // The warp's index-th token.
  [[nodiscard]] __device__ __forceinline__ int token_at(int index) const {
    const int chunk = first_chunk_ + index / chunk_tokens_ * chunk_step_;
    return chunk * chunk_tokens_ + index % chunk_tokens_;
  }

  [[nodiscard]] __device__ __forceinline__ TokenRoutes routes_of(int token) const {
    const PlanView& plan = call_.plan;
    const int lane = lane_index();
    TokenRoutes routes;
    if (lane < me_.num_ranks) {
      const int64_t pair = static_cast<int64_t>(token) * me_.num_ranks + lane;
      routes.primary = plan.primary()[pair];
      routes.arrival = plan.arrival()[pair];
    }
    const int64_t route = static_cast<int64_t>(token) * max_topk_ + lane;
    if (call_.one_row) {
      routes.own_slot = lane == me_.rank ? routes.primary : -1;
    } else if (lane < call_.topk) {
      const int32_t expert = plan.route_expert()[route] - me_.rank * local_experts_;
      if (expert >= 0 && expert < local_experts_) {
        routes.own_slot = plan.route_slot()[route];
      }
    }
    return routes;
  }

  [[nodiscard]] __device__ __forceinline__ int64_t out_row_bytes() const {
    return call_.quantise == Quantise::kNone ? call_.row_bytes : call_.row_bytes / 2;
  }

  [[nodiscard]] __device__ __forceinline__ Targets targets_of(const TokenRoutes& routes) const {
    const int lane = lane_index();
    Targets targets;
    if (routes.primary >= 0 && lane != me_.rank) {
      const int64_t row = setup_.place[lane] == DevicePlace::kPrimarySlot
                              ? routes.primary
                              : setup_.first_row[lane] + routes.arrival;
      targets.first = setup_.rows[lane] + row * out_row_bytes();
    }
    if (routes.own_slot >= 0) {
      targets.second = call_.out_rows + routes.own_slot * out_row_bytes();
    }
    return targets;
  }

  // Scale rows always go through staging.
  [[nodiscard]] __device__ __forceinline__ std::byte* scale_targets_of(const TokenRoutes& routes
  ) const {
    const int lane = lane_index();
    if (routes.primary < 0 || call_.scale_bytes == 0) {
      return nullptr;
    }
    const int64_t row = setup_.first_row[lane] + routes.arrival;
    return setup_.scales[lane] + row * staged_scale_bytes(call_.scale_bytes);
  }

  // Weights and scale rows of one token, to every rank it goes to, this one included.
  __device__ __forceinline__ void move_extras(int token, const TokenRoutes& routes) const {
    const int lane = lane_index();
    if (call_.scales != nullptr) {
      const Targets targets = {scale_targets_of(routes), nullptr};
      const std::byte* row = call_.scales + static_cast<int64_t>(token) * call_.scale_bytes;
      for_each_target(targets, [&](std::byte* target) {
        copy_bytes_warp(target, row, call_.scale_bytes);
      });
    }
    if (call_.weights == nullptr) {
      return;
    }
    float weight = 0;
    if (lane < call_.topk) {
      const int64_t route = static_cast<int64_t>(token) * call_.topk + lane;
      if (!call_.from_map) {
        weight = call_.weights[route];
      } else {
        const int32_t expert =
            call_.plan.route_expert()[static_cast<int64_t>(token) * max_topk_ + lane];
        weight = expert < 0 ? 0
                            : call_.weights
                                  [static_cast<int64_t>(token) * me_.map.num_experts +
                                   static_cast<uint32_t>(expert)];
      }
    }
    std::byte* mine = nullptr;
    if (routes.primary >= 0) {
      mine = reinterpret_cast<std::byte*>(
          setup_.weights[lane] + static_cast<int64_t>(routes.arrival) * max_topk_
      );
    }
    for_each_target({mine, nullptr}, [&](std::byte* target) {
      if (lane < call_.topk) {
        reinterpret_cast<float*>(target)[lane] = weight;
      }
    });
  }

  // The warp's stores are done or ordered before: lane r tells rank r.
  __device__ __forceinline__ void signal(int chunk) const {
    const int lane = lane_index();
    if (lane < me_.num_ranks) {
      ptx::fence_sys();
      const auto slot =
          me_.map.signals().dispatch(static_cast<uint32_t>(me_.rank), static_cast<uint32_t>(chunk));
      ptx::store_relaxed_sys(setup_.signals[lane] + slot, setup_.epoch);
    }
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  int num_tokens_;
  int chunk_tokens_;
  int num_chunks_;
  int local_experts_;
  int max_topk_;
  int first_chunk_;
  int chunk_step_;
};

}  // namespace weft
