// SPDX-License-Identifier: Apache-2.0
#include "group/environment.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "core/check.hpp"
#include "core/descriptor.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/socket.hpp"

namespace weft {
namespace {

using Text = std::optional<std::string>;

constexpr const char* kLoopback = "127.0.0.1";

// Distance of the port from MASTER_PORT, which torchrun's own store holds.
constexpr int kTorchPortOffset = 17;

// Ports derived from a job's name lie below those that systems hand out by themselves.
constexpr uint32_t kFirstJobPort = 20000;
constexpr uint32_t kNumJobPorts = 12000;

// Place of a rank as a launcher tells it. A port or an address that is missing the user must give.
struct Placement {
  int rank = 0;
  int num_ranks = 1;
  Text address;
  std::optional<int> port;
  std::string job;           // keeps groups that share a user's secret apart
  const char* told_by = "";  // the variable that says how many ranks there are
};

int job_port(const std::string& job) {
  uint32_t hash = 2166136261U;  // FNV-1a: the same on every rank
  for (const char c : job) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  }
  return static_cast<int>(kFirstJobPort + hash % kNumJobPorts);
}

// Returns the value of the first name that is set.
template <class... Names>
Text say(const Env& env, const Names*... names) {
  for (const char* name : {names...}) {
    if (const auto found = env.launcher.find(name); found != env.launcher.end()) {
      return found->second;
    }
  }
  return std::nullopt;
}

Placement place(const char* rank_name, const Text& rank, const char* size_name, const Text& size) {
  Placement placement;
  placement.told_by = size_name;
  WEFT_CHECK_ARG(Context{}, size, "from_env: {} is not set ({} is)", size_name, rank_name);
  WEFT_CHECK_ARG(Context{}, rank, "from_env: {} is not set ({} is)", rank_name, size_name);
  placement.num_ranks = parse_env_int(size_name, *size, 1, kMaxRanks);
  placement.rank = parse_env_int(rank_name, *rank, 0, placement.num_ranks - 1);
  return placement;
}

Placement from_weft(const Env& env) {
  const auto text = [](const std::optional<int>& value) {
    return value ? Text(std::to_string(*value)) : std::nullopt;
  };
  Placement placement = place("WEFT_RANK", text(env.rank), "WEFT_NUM_RANKS", text(env.num_ranks));
  placement.address = kLoopback;
  return placement;
}

Placement from_torchrun(const Env& env) {
  const Text size = say(env, "WORLD_SIZE");
  Placement placement = place("RANK", say(env, "RANK"), "WORLD_SIZE", size);
  placement.address =
      say(env, "LOCAL_WORLD_SIZE") == size ? Text(kLoopback) : say(env, "MASTER_ADDR");
  if (const Text held = say(env, "MASTER_PORT")) {
    const int port = parse_env_int("MASTER_PORT", *held, 1, 65535);
    const bool has_room = port + kTorchPortOffset <= 65535;
    placement.port = has_room ? port + kTorchPortOffset : port - kTorchPortOffset;
    placement.job =
        fmt::format("torchrun {} {}", say(env, "TORCHELASTIC_RUN_ID").value_or(""), *held);
  }
  return placement;
}

Placement from_mpirun(const Env& env) {
  const Text size = say(env, "OMPI_COMM_WORLD_SIZE");
  const Text rank = say(env, "OMPI_COMM_WORLD_RANK");
  Placement placement = place("OMPI_COMM_WORLD_RANK", rank, "OMPI_COMM_WORLD_SIZE", size);
  if (const Text here = say(env, "OMPI_COMM_WORLD_LOCAL_SIZE"); !here || here == size) {
    placement.address = kLoopback;
  }
  if (const Text job = say(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")) {
    placement.job = "mpirun " + *job;
    placement.port = job_port(placement.job);
  }
  return placement;
}

Placement from_srun(const Env& env) {
  const Text size = say(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
  Placement placement = place("SLURM_PROCID", say(env, "SLURM_PROCID"), "SLURM_NTASKS", size);
  const Text num_nodes = say(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES");
  if (num_nodes.value_or("1") == "1") {
    placement.address = kLoopback;
  }
  if (const Text job = say(env, "SLURM_JOB_ID")) {
    placement.job = fmt::format("srun {}.{}", *job, *say(env, "SLURM_STEP_ID"));
    placement.port = job_port(placement.job);
  }
  return placement;
}

Placement find_placement(const Env& env) {
  if (env.rank || env.num_ranks) {
    return from_weft(env);
  }
  if (say(env, "RANK", "WORLD_SIZE")) {
    return from_torchrun(env);
  }
  if (say(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")) {
    return from_mpirun(env);
  }
  // A batch script has SLURM_PROCID too, but no step of its own.
  if (say(env, "SLURM_PROCID") && say(env, "SLURM_STEP_ID")) {
    return from_srun(env);
  }
  return {};
}

std::string find_secret(const Env& env, const std::string& address) {
  if (env.secret) {
    return *env.secret;
  }
  if (env.secret_file) {
    return read_secret_file(*env.secret_file);
  }
  const bool is_local = std::ranges::all_of(resolve(address, 0, {}), is_loopback);
  WEFT_CHECK_ARG(
      Context{},
      is_local,
      "from_env: WEFT_SECRET is not set ({} is not a loopback address). Set it, or "
      "WEFT_SECRET_FILE, to the same random text on every rank",
      address
  );
  return user_secret(env);
}

namespace fs = std::filesystem;

constexpr size_t kRandomBytes = 32;
constexpr size_t kMaxFileBytes = 4096;

template <class... Args>
[[noreturn]] void fail(
    const std::string& path, fmt::format_string<Args...> format, Args&&... args
) {
  const std::string why = fmt::format(format, std::forward<Args>(args)...);
  WEFT_RAISE(Context{}, ErrorCode::kFile, "secret: {}: {}", path, why);
}

std::string random_text() {
  return fmt::format("{:02x}", fmt::join(random_value<std::array<uint8_t, kRandomBytes>>(), ""));
}

// Makes the file whole or not at all: it gets its name only when its text is in it, and a name that
// another rank was first to take stays.
void create_secret_file(const std::string& path) {
  const std::string draft = fmt::format("{}.{}.{}", path, getpid(), random_text().substr(0, 16));
  const std::string text = random_text() + "\n";
  {
    const int flags = O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC;
    const Descriptor file(open(draft.c_str(), flags, S_IRUSR | S_IWUSR));
    const auto size = static_cast<ssize_t>(text.size());
    if (!file.is_open() || write(file.get(), text.data(), text.size()) != size) {
      const int error = errno;
      unlink(draft.c_str());
      fail(draft, "cannot be written ({})", std::strerror(error));
    }
  }
  const bool is_linked = link(draft.c_str(), path.c_str()) == 0 || errno == EEXIST;
  const int error = errno;
  unlink(draft.c_str());
  if (!is_linked) {
    fail(path, "cannot be made ({})", std::strerror(error));
  }
}

fs::path user_folder(const Env& env) {
  if (env.runtime_dir) {
    return fs::path(*env.runtime_dir) / "weft";
  }
  if (env.home) {
    return fs::path(*env.home) / ".config" / "weft";
  }
  raise_error(
      ErrorCode::kInvalidArgument,
      {},
      "secret: no place to keep one (neither XDG_RUNTIME_DIR nor HOME is set). Set WEFT_SECRET"
  );
}

}  // namespace

int launched_ranks(const Env& env) {
  return find_placement(env).num_ranks;
}

Rendezvous rendezvous_from(const Env& env) {
  const Placement placement = find_placement(env);
  Rendezvous rendezvous = {.rank = placement.rank, .num_ranks = placement.num_ranks};
  rendezvous.timeout = env.timeout;
  if (placement.num_ranks == 1) {
    return rendezvous;
  }
  const auto require = [&](bool is_set, const char* name, const char* need) {
    WEFT_CHECK_ARG(
        Context{},
        is_set,
        "from_env: {} is not set ({} = {} ranks {})",
        name,
        placement.told_by,
        placement.num_ranks,
        need
    );
  };
  const Text address = env.address ? env.address : placement.address;
  require(address.has_value(), "WEFT_ADDRESS", "on several hosts need the address of rank 0");
  const std::optional<int> port = env.port ? env.port : placement.port;
  require(port.has_value(), "WEFT_PORT", "need a free port of rank 0's host");
  rendezvous.address = *address;
  rendezvous.port = *port;
  rendezvous.secret = find_secret(env, *address);
  WEFT_CHECK_ARG(
      Context{},
      rendezvous.secret.size() >= kMinSecretBytes,
      "from_env: WEFT_SECRET has {} B (at least {})",
      rendezvous.secret.size(),
      kMinSecretBytes
  );
  rendezvous.secret += placement.job;
  return rendezvous;
}

std::string read_secret_file(const std::string& path) {
  // Does not wait for the other end if the file is a pipe.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) {
    fail(path, "cannot be read ({})", std::strerror(errno));
  }
  struct stat status = {};
  WEFT_SYS(Context{}, ErrorCode::kFile, fstat(file.get(), &status));
  if (!S_ISREG(status.st_mode)) {
    fail(path, "is not a file with text, but a folder, pipe or device");
  }
  if (status.st_uid != geteuid()) {
    fail(path, "belongs to user {} (expected {})", status.st_uid, geteuid());
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    fail(
        path,
        "is open to other users (mode {:o}, expected 600). chmod 600 it, or make a new one",
        status.st_mode & 0777U
    );
  }
  std::string text(kMaxFileBytes, '\0');
  const auto count = read(file.get(), text.data(), text.size());
  if (count < 0) {
    fail(path, "cannot be read ({})", std::strerror(errno));
  }
  text.resize(static_cast<size_t>(count));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) {
    text.pop_back();
  }
  if (text.size() < kMinSecretBytes) {
    fail(path, "holds {} B (a secret has at least {})", text.size(), kMinSecretBytes);
  }
  return text;
}

std::string user_secret(const Env& env) {
  const fs::path folder = user_folder(env);
  std::error_code error;
  if (fs::create_directories(folder, error)) {
    fs::permissions(folder, fs::perms::owner_all, error);
  }
  if (error) {
    fail(folder, "cannot be made ({}). Set WEFT_SECRET", error.message());
  }
  const fs::path path = folder / "secret";
  if (!fs::exists(path, error)) {
    create_secret_file(path);
  }
  return read_secret_file(path);
}

}  // namespace weft
