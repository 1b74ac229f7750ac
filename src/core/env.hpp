// SPDX-License-Identifier: Apache-2.0
// Every environment variable that Weft reads, in one place. An empty variable counts as not set.
#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "core/log.hpp"

namespace weft {

// How rows get from a GPU to a network and back.
enum class FabricGpuMemory : uint8_t {
  kAuto,    // straight where the network's card reaches the GPU's memory
  kDirect,  // also where libfabric itself copies it
  kHost,    // by way of pinned memory of the host
};

// Use of copy engines for the rows of exchanges that overlap with computation.
enum class CopyEngines : uint8_t { kAuto, kNever, kAlways };  // docs/overlap.md

struct Env {
  // Place of this process: all ranks must agree on everything but the rank.
  std::optional<int> rank;                 // WEFT_RANK
  std::optional<int> num_ranks;            // WEFT_NUM_RANKS
  std::optional<std::string> address;      // WEFT_ADDRESS, where rank 0 listens
  std::optional<int> port;                 // WEFT_PORT
  std::optional<std::string> secret;       // WEFT_SECRET, at least 16 bytes
  std::optional<std::string> secret_file;  // WEFT_SECRET_FILE, readable only by its owner
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  // WEFT_TIMEOUT_S, of set-up
  // WEFT_CALL_TIMEOUT_S, of calls of the Python package where the program says none.
  std::optional<std::chrono::milliseconds> call_timeout;

  // How Weft works.
  std::optional<int> ranks_per_domain;       // WEFT_RANKS_PER_DOMAIN, makes domains smaller
  std::string transport = "auto";            // WEFT_TRANSPORT, a name listed by `weft info`
  std::optional<std::string> gpu_transport;  // WEFT_GPU_TRANSPORT, likewise, of processes' GPUs
  int num_threads = 0;                // WEFT_NUM_THREADS, 0: cores shared among the host's ranks
  std::optional<std::string> fabric;  // WEFT_FABRIC, "tcp" or "verbs/mlx5_0"
  std::optional<std::string> fabric_address;  // WEFT_FABRIC_ADDRESS, interface, address or network
  int fabric_queues = 1;                      // WEFT_FABRIC_QUEUES, endpoints of each rank
  FabricGpuMemory fabric_gpu_memory = FabricGpuMemory::kAuto;  // WEFT_FABRIC_GPU_MEMORY
  uint64_t rxm_buffer_bytes = 0;         // FI_OFI_RXM_BUFFER_SIZE, libfabric's own; 0: not set
  LogLevel log_level = LogLevel::kWarn;  // WEFT_LOG: debug, info, warn, error, off or calls

  std::optional<std::string> tuning;              // WEFT_TUNING, a file that `weft tune` wrote
  CopyEngines copy_engines = CopyEngines::kAuto;  // WEFT_COPY_ENGINES, the same on every rank

  // Folders for the user's secret when none is given.
  std::optional<std::string> runtime_dir;  // XDG_RUNTIME_DIR
  std::optional<std::string> home;         // HOME

  // Variables of launchers: torchrun, mpirun of OpenMPI, srun. Kept as text: only the variables of
  // the launcher in charge are ever parsed (group/environment.cpp).
  std::map<std::string, std::string> launcher;

  // Null for a variable that is not set.
  using Lookup = std::function<const char*(const char* name)>;

  // Reads all. Throws Error (kInvalidArgument) naming a variable of Weft's own with its value.
  [[nodiscard]] static Env read();
  [[nodiscard]] static Env read(const Lookup& lookup);
};

// Returns the whole text as a number, or nothing.
template <class Number>
[[nodiscard]] std::optional<Number> parse_number(std::string_view text) {
  Number number = {};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// Parses `value`. Throws Error (kInvalidArgument) naming the variable, its value and the range.
[[nodiscard]] int parse_env_int(std::string_view name, const std::string& value, int min, int max);

}  // namespace weft
