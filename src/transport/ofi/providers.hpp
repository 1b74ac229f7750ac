// SPDX-License-Identifier: Apache-2.0
// The providers of libfabric that Weft knows, and all that differs between them which libfabric
// does not tell itself (kProviders in providers.cpp is the table). The rest, such as how memory is
// registered, is read from fi_info.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/env.hpp"
#include "transport/ofi/api.hpp"

namespace weft::ofi {

struct Provider {
  std::string_view name;
  // Shares memory between ranks of one host. Used when asked for by name; every rank sends a first
  // message to every other at set-up, since one whose sender has closed crashes its receiver, and
  // ranks of one process close together.
  bool is_local = false;
  // Its cards read and write the memory of GPUs. Others that take it have libfabric copy it by
  // calls of CUDA, which may wait for work that waits for them.
  bool reaches_gpus = false;
  // Bound to an IP address that is ours to choose.
  bool takes_address = false;
  // Completion level of a write that raises a signal. FI_DELIVERY_COMPLETE where only that says
  // that an endpoint may close; FI_TRANSMIT_COMPLETE where what is sent later on the same
  // connection arrives later, so that a delivered farewell vouches for all writes before it.
  uint64_t write_completion = FI_DELIVERY_COMPLETE;
  std::string_view remark;
};

// Best first.
[[nodiscard]] std::span<const Provider> providers();

// What the user asked for.
struct FabricWish {
  std::string provider;              // empty: the best
  std::vector<std::string> domains;  // of libfabric, such as "mlx5_0", to choose from; none: any
  std::string address;               // for local_address()
  int num_queues = 1;
  bool has_one_host = true;  // all ranks are on this host
  std::string device;        // PCI address of this rank's GPU; empty: none
  bool has_gpu = false;      // memory of which would be sent and received
  FabricGpuMemory gpu_memory = FabricGpuMemory::kAuto;
  size_t turn = 0;  // number of this rank among those of its host
};

// `kind` ("tcp" or "verbs/mlx5_0,mlx5_1"; empty: WEFT_FABRIC), WEFT_FABRIC_ADDRESS,
// WEFT_FABRIC_QUEUES, WEFT_FABRIC_GPU_MEMORY. Throws Error (kInvalidArgument) for an unknown
// provider.
[[nodiscard]] FabricWish read_wish(const Env& env, std::string_view kind);

// A provider as this rank finds it.
struct Offer {
  const Provider* provider = nullptr;
  Info info;                 // null if there is an obstacle
  size_t num_cards = 0;      // it could have been on
  std::string obstacle;      // why it cannot be used
  std::string gpu_obstacle;  // why it does not take memory of GPUs
};

// One for each entry of providers(), in that order; api() must have loaded.
[[nodiscard]] std::vector<Offer> list_offers(const FabricWish& wish);

// "best of those that are usable" or "asked for by WEFT_FABRIC"
[[nodiscard]] std::string reason_for(const FabricWish& wish);

}  // namespace weft::ofi
