// SPDX-License-Identifier: Apache-2.0
#include "core/env.hpp"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "core/check.hpp"

namespace weft {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

constexpr const char* kOfLaunchers[] = {
    // torchrun
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    // mpirun of OpenMPI
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    // srun
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID"};

class Reader {
 public:
  explicit Reader(const Env::Lookup& lookup) : lookup_(lookup) {}

  [[nodiscard]] std::optional<std::string> text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  }
  [[nodiscard]] std::optional<int> number(const char* name, int min, int max) const {
    const auto value = text(name);
    return value ? std::optional<int>(parse_env_int(name, *value, min, max)) : std::nullopt;
  }
  [[nodiscard]] std::optional<std::chrono::milliseconds> seconds(const char* name) const {
    const auto value = text(name);
    if (!value) {
      return std::nullopt;
    }
    const auto number = parse_number<double>(*value);
    WEFT_CHECK_ARG(
        Context{},
        number && *number >= 0.001 && *number <= 1e6,
        "environment: {} = \"{}\" is not a number of seconds in [0.001, 1000000]",
        name,
        *value
    );
    return std::chrono::milliseconds(static_cast<int64_t>(*number * 1000));
  }
  // Reads one of `words`, which stand for 0, 1 and so on.
  template <class Enum>
  void choose(const char* name, Enum& choice, std::initializer_list<std::string_view> words) const {
    const auto value = text(name);
    if (!value) {
      return;
    }
    const auto found = std::find(words.begin(), words.end(), *value);
    WEFT_CHECK_ARG(
        Context{},
        found != words.end(),
        "environment: {} = \"{}\" is not one of {}",
        name,
        *value,
        fmt::join(words, ", ")
    );
    choice = static_cast<Enum>(found - words.begin());
  }

 private:
  const Env::Lookup& lookup_;
};

}  // namespace

int parse_env_int(std::string_view name, const std::string& value, int min, int max) {
  const auto number = parse_number<int>(value);
  WEFT_CHECK_ARG(
      Context{},
      number && *number >= min && *number <= max,
      "environment: {} = \"{}\" is not a whole number {}",
      name,
      value,
      max == kMaxInt ? fmt::format("of at least {}", min) : fmt::format("in [{}, {}]", min, max)
  );
  return *number;
}

Env Env::read() {
  return read([](const char* name) -> const char* { return std::getenv(name); });
}

Env Env::read(const Lookup& lookup) {
  const Reader reader(lookup);
  Env env;
  env.rank = reader.number("WEFT_RANK", 0, kMaxInt);
  env.num_ranks = reader.number("WEFT_NUM_RANKS", 1, kMaxInt);
  env.address = reader.text("WEFT_ADDRESS");
  env.port = reader.number("WEFT_PORT", 1, 65535);
  env.secret = reader.text("WEFT_SECRET");
  env.secret_file = reader.text("WEFT_SECRET_FILE");
  env.timeout = reader.seconds("WEFT_TIMEOUT_S").value_or(env.timeout);
  env.call_timeout = reader.seconds("WEFT_CALL_TIMEOUT_S");
  env.ranks_per_domain = reader.number("WEFT_RANKS_PER_DOMAIN", 1, kMaxInt);
  env.transport = reader.text("WEFT_TRANSPORT").value_or(env.transport);
  env.gpu_transport = reader.text("WEFT_GPU_TRANSPORT");
  env.num_threads = reader.number("WEFT_NUM_THREADS", 0, kMaxInt).value_or(0);
  env.fabric = reader.text("WEFT_FABRIC");
  env.fabric_address = reader.text("WEFT_FABRIC_ADDRESS");
  env.fabric_queues = reader.number("WEFT_FABRIC_QUEUES", 1, 16).value_or(env.fabric_queues);
  reader.choose("WEFT_FABRIC_GPU_MEMORY", env.fabric_gpu_memory, {"auto", "direct", "host"});
  env.rxm_buffer_bytes =
      parse_number<uint64_t>(reader.text("FI_OFI_RXM_BUFFER_SIZE").value_or("")).value_or(0);
  reader.choose("WEFT_LOG", env.log_level, {"debug", "info", "warn", "error", "off", "calls"});
  if (reader.text("WEFT_LOG") == "calls") {  // for the Python package, which logs its calls
    env.log_level = LogLevel::kWarn;
  }
  env.tuning = reader.text("WEFT_TUNING");
  reader.choose("WEFT_COPY_ENGINES", env.copy_engines, {"auto", "never", "always"});
  env.runtime_dir = reader.text("XDG_RUNTIME_DIR");
  env.home = reader.text("HOME");
  for (const char* name : kOfLaunchers) {
    if (auto value = reader.text(name)) {
      env.launcher[name] = std::move(*value);
    }
  }
  return env;
}

}  // namespace weft
