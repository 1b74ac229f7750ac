// SPDX-License-Identifier: Apache-2.0
// libfabric, a library that may be missing: its functions, its providers, and the one that all
// ranks use, opened.
#pragma once

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"
#include "core/host_map.hpp"
#include "transport/transport.hpp"
#include "weft/group.hpp"
#include "weft/tensor.hpp"

namespace weft::ofi {

// Version that is asked of libfabric, whatever newer headers would ask. From 1.18 on providers may
// call CUDA unless FI_OPT_CUDA_API_PERMITTED is set to false, and such a call may wait for work
// that waits for its end.
constexpr uint32_t kApiVersion = FI_VERSION(1, 17);

// How the program handles signals, restored at the end of the scope. Providers of libfabric and the
// libraries under them (psm, shm) put handlers of their own in place of SIGINT's, SIGTERM's and
// others' when they are loaded or started. Those of psm end the process with exit(1), those of shm
// swallow a signal: Python would never hear of Ctrl-C.
class KeptHandlers {
 public:
  KeptHandlers();
  ~KeptHandlers();
  KeptHandlers(const KeptHandlers&) = delete;
  KeptHandlers& operator=(const KeptHandlers&) = delete;

 private:
  std::array<std::optional<struct sigaction>, NSIG> handlers_;  // by signal
};

// The few functions that libfabric exports, looked up at run time. Everything else in its headers
// is inline and goes through tables that these functions return.
struct Api {
  std::string obstacle;  // empty: the functions are there
  std::string version;   // "1.17"
  // FI_OFI_RXM_BUFFER_SIZE when libfabric read it. Layer ofi_rxm refuses peers with another one
  // again and again, without a word.
  uint64_t rxm_buffer_bytes = 0;
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
};

// Loads the library on first use and keeps it; any thread.
[[nodiscard]] const Api& api();

// Returns a text such as "Connection refused (111)", for an error of either sign.
[[nodiscard]] std::string error_text(int64_t error);

// Throws if `result` is negative: "fi_domain: Connection refused (111), provider tcp".
void check_call(
    const Context& context,
    std::string_view provider,
    std::string_view call,
    int64_t result,
    ErrorCode code = ErrorCode::kNotAvailable
);

struct CloseObject {
  template <class Object>
  void operator()(Object* object) const {
    static_cast<void>(fi_close(&object->fid));
  }
};
template <class Object>
using Owned = std::unique_ptr<Object, CloseObject>;  // fid_fabric, fid_domain, ...

struct FreeInfo {
  void operator()(fi_info* info) const { api().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// The providers of libfabric that Weft knows, and all that differs between them which libfabric
// does not tell itself (kProviders in providers.cpp is the table). The rest, such as how memory is
// registered, is read from fi_info.
struct Provider {
  std::string_view name;
  // Shares memory between ranks of one host. Used when asked for by name; every rank sends a first
  // message to every other at set-up, since one whose sender has closed crashes its receiver, and
  // ranks of one process close together.
  bool is_local = false;
  // Its cards read and write the memory of GPUs. Other providers that take such memory have
  // libfabric copy it by calls of CUDA, which may wait for work that waits for them.
  bool reaches_gpus = false;
  // Bound to an IP address that is ours to choose.
  bool takes_address = false;
  // Completion level of a write that raises a signal. FI_DELIVERY_COMPLETE where only that says
  // that an endpoint may close; FI_TRANSMIT_COMPLETE where what is sent later on the same
  // connection arrives later, so that a delivered farewell proves that all writes before it have
  // arrived.
  uint64_t write_completion = FI_DELIVERY_COMPLETE;
  std::string_view remark;
};

// Returns all providers, best first.
[[nodiscard]] std::span<const Provider> providers();

// Fabric that the user asked for, and what is known of the rank that asks.
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

// Reads `kind` ("tcp" or "verbs/mlx5_0,mlx5_1"; empty: WEFT_FABRIC), WEFT_FABRIC_ADDRESS,
// WEFT_FABRIC_QUEUES, WEFT_FABRIC_GPU_MEMORY. Throws Error (kInvalidArgument) for an unknown
// provider.
[[nodiscard]] FabricWish read_wish(const Env& env, std::string_view kind);

// A provider as this rank finds it.
struct Offer {
  const Provider* provider = nullptr;
  Info info;                 // null if there is an obstacle
  size_t num_cards = 0;      // that it could have been on
  std::string obstacle;      // why it cannot be used
  std::string gpu_obstacle;  // why it does not take memory of GPUs
};

// Returns one for each entry of providers(), in that order; api() must have loaded.
[[nodiscard]] std::vector<Offer> list_offers(const FabricWish& wish);

// One opened provider of one rank: its fabric, its domain, and how memory becomes reachable in it.
class Fabric {
 public:
  // Throws Error (kNotAvailable) naming provider and call.
  Fabric(const Provider& provider, Info info, const Context& context);
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  [[nodiscard]] const Provider& provider() const { return *provider_; }
  [[nodiscard]] std::string_view name() const { return info_->fabric_attr->prov_name; }
  [[nodiscard]] fi_info* info() const { return info_.get(); }
  [[nodiscard]] fid_fabric* fabric() const { return fabric_.get(); }
  [[nodiscard]] fid_domain* domain() const { return domain_.get(); }
  [[nodiscard]] const Context& context() const { return context_; }
  // check_call() with this provider's name.
  void check(std::string_view call, int64_t result, ErrorCode code = ErrorCode::kNotAvailable)
      const {
    check_call(context_, name(), call, result, code);
  }

  // Sources of writes and messages must be registered.
  [[nodiscard]] bool needs_local() const { return has_mode(FI_MR_LOCAL); }
  // Peers name memory by the owner's addresses, else by offsets.
  [[nodiscard]] bool has_addresses() const { return has_mode(FI_MR_VIRT_ADDR); }
  // Memory belongs to one endpoint.
  [[nodiscard]] bool binds_memory() const { return has_mode(FI_MR_ENDPOINT); }

  // Returns why memory of GPUs cannot be registered; empty: it can. Set-up finds out.
  [[nodiscard]] const std::string& gpu_memory_obstacle() const { return gpu_memory_obstacle_; }
  void refuse_gpu_memory(std::string why) { gpu_memory_obstacle_ = std::move(why); }

  struct Memory {
    const void* data = nullptr;
    uint64_t bytes = 0;
    Device device = {};
  };
  // Registers memory for as long as the result lives; `endpoint` is used where memory is bound to
  // one. Throws Error (kOutOfMemory).
  [[nodiscard]] Owned<fid_mr> add_memory(const Memory& memory, uint64_t access, fid_ep* endpoint);

 private:
  [[nodiscard]] bool has_mode(int bit) const { return (info_->domain_attr->mr_mode & bit) != 0; }

  const Provider* provider_;
  Context context_;
  Info info_;
  std::string gpu_memory_obstacle_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  std::atomic<uint64_t> next_key_;  // asked for where the provider makes none itself
};

// Returns what `kind`, else the environment asks for, for these ranks.
[[nodiscard]] FabricWish wish_for(
    const Group& group, std::string_view kind, std::string_view device = {}
);

struct Selection : Offer {
  uint32_t num_queues = 1;  // the fewest that any rank asks for or can have
};

// Collective. Throws the same Error (kNotAvailable) on every rank, with what each provider lacks
// and where.
[[nodiscard]] Selection select_provider(
    const Group& group, std::string_view kind, const TransportOptions& options = {}
);

// --- which of a host's cards and addresses a rank uses: a card that lies near its GPU, or near its
// cores, and where several do, ranks of the host take them in turns (card.cpp) ---

// Returns the first entry of each domain, in a list as fi_getinfo gives it, that the first one's
// provider offers and that is `wanted`, or, if none is named, is of the first one's fabric: others
// may lead elsewhere.
[[nodiscard]] std::vector<const fi_info*> list_cards(
    const fi_info* offers, std::span<const std::string> wanted
);

// Returns such as "0000:17:00.0"; empty: there is no card, or the provider does not say where.
[[nodiscard]] std::string card_address(const fi_info& offer);

// Returns the index of the rank's card. `device`: PCI address of its GPU, or empty; `turn`: the
// rank's number among those of its host.
[[nodiscard]] size_t choose_card(
    const HostMap& map, std::string_view device, std::span<const std::string> cards, size_t turn
);

// Returns cores for the threads that poll a card: those near it, or, if unknown, near the GPU.
[[nodiscard]] std::vector<int> cores_for(const fi_info& offer, std::string_view device);

}  // namespace weft::ofi
