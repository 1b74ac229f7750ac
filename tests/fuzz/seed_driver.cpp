// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target without a fuzzer: on the files of a corpus folder, on slightly changed copies
// of them, and on random bytes. `TARGET [CORPUS]`
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "core/atomic_file.hpp"
#include "fuzz/fuzz_input.hpp"
#include "plan/random_routing.hpp"

namespace {

constexpr int kNumRandom = 400;
constexpr int kNumChanged = 200;  // of each file

void run(const std::string& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

std::string random_bytes(weft::RandomSource& random) {
  std::string bytes(random.below(300), '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(random.below(256));
  }
  return bytes;
}

// Flips bits, or cuts, or doubles a part.
std::string changed(std::string bytes, weft::RandomSource& random) {
  for (int64_t i = random.between(1, 4); i > 0 && !bytes.empty(); --i) {
    const size_t at = random.below(bytes.size());
    switch (random.below(4)) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        bytes.insert(at, bytes.substr(at, 16));
        break;
      default:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << random.below(8));
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  weft::RandomSource random(1);
  int num_inputs = 0;
  for (; num_inputs < kNumRandom; ++num_inputs) {
    run(random_bytes(random));
  }
  int num_files = 0;
  if (argc > 1) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      const std::string seed = weft::read_whole_file(entry.path().string());
      run(seed);
      ++num_files;
      for (int i = 0; i < kNumChanged; ++i, ++num_inputs) {
        run(changed(seed, random));
      }
    }
  }
  std::printf("%d inputs and %d seeds of the corpus held\n", num_inputs, num_files);
  return num_files > 0 ? 0 : 1;
}
