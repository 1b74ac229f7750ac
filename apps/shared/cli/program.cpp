// SPDX-License-Identifier: Apache-2.0
#include "cli/program.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>

#include "cli/standard_streams.hpp"
#include "core/atomic_file.hpp"
#include "weft/version.hpp"

namespace weft::program {
namespace {

constexpr int kGood = 0;
constexpr int kFailed = 1;
constexpr int kBadUsage = 2;

// "weft plan", or "weft" while no command is known.
std::string speaker(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  return commands.empty() ? app.get_name() : app.get_name() + " " + commands.front()->get_name();
}

// One line; the command's name is not said twice.
void print_error(const CLI::App& app, std::string_view text, std::string_view hint = {}) {
  const std::string name = speaker(app);
  const std::string verb = name.substr(name.find(' ') + 1) + ": ";
  if (text.starts_with(verb)) {
    text.remove_prefix(verb.size());
  }
  fmt::print(stderr, "{}: {}{}\n", name, text, hint);
}

// Otherwise CLI11 would say that a command is missing, not that it is unknown.
void check_command(const CLI::App& app, int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "-";
  std::string names;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == word) {
      return;
    }
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  if (!word.starts_with('-')) {
    throw CLI::ValidationError(fmt::format("\"{}\" is not one of {}", word, names));
  }
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    check_command(app, argc, argv);
    app.parse(argc, argv);
    return kGood;
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::Success& asked_for_text) {  // --help, --version
    return app.exit(asked_for_text);
  } catch (const CLI::ParseError& error) {
    print_error(app, error.what(), fmt::format(" (see {} --help)", speaker(app)));
    return kBadUsage;
  } catch (const std::exception& error) {
    print_error(app, error.what());
    return kFailed;
  }
}

// Returns whether the path is a device or a pipe, which has nothing to lose.
bool is_special(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_other(std::filesystem::status(path, ignored));
}

bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (std::filesystem::equivalent(a, b, error)) {
    return true;
  }
  const auto full_a = std::filesystem::weakly_canonical(a, error);
  return !error && full_a == std::filesystem::weakly_canonical(b, error) && !error;
}

void refuse_same_file(const NamedPath& output, const NamedPath& other) {
  if (!other.path.empty() && !is_special(output.path) && is_same_file(output.path, other.path)) {
    throw CLI::ValidationError(
        fmt::format("{} would replace {} of {}", output.option, output.path, other.option)
    );
  }
}

}  // namespace

void check_outputs(
    std::initializer_list<NamedPath> outputs, std::initializer_list<NamedPath> inputs
) {
  for (const NamedPath& output : outputs) {
    if (output.path.empty()) {
      continue;
    }
    for (const NamedPath& input : inputs) {
      refuse_same_file(output, input);
    }
    for (const NamedPath* other = outputs.begin(); other != &output; ++other) {
      refuse_same_file(output, *other);
    }
    check_writable(output.path);
  }
}

int run_program(CLI::App& app, int argc, char** argv) {
  open_standard_streams();
  app.set_version_flag("--version", fmt::format("{} {}", app.get_name(), version()));
  const int status = run(app, argc, argv);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    print_error(app, "what was printed could not be written in full");
    return kFailed;
  }
  return status;
}

}  // namespace weft::program
