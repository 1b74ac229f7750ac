// SPDX-License-Identifier: Apache-2.0
#include "group/agree.hpp"

#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "group/control_plane.hpp"

namespace weft {
namespace {

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Returns one byte of code and the text.
Bytes encode(ErrorCode code, const std::string& text) {
  Bytes block(1 + text.size());
  block[0] = static_cast<std::byte>(code);
  std::memcpy(block.data() + 1, text.data(), text.size());
  return block;
}

// Cuts off the place of the first failure; the re-throw adds its own.
std::string without_place(std::string text) {
  if (const auto at = text.rfind(" at "); at != std::string::npos) {
    text.resize(at);
  }
  return text;
}

}  // namespace

Bytes outcome_of(const std::function<void()>& step) {
  try {
    step();
    return {};
  } catch (const Error& error) {
    return encode(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return encode(ErrorCode::kOutOfMemory, "open: no memory left");
  } catch (const std::system_error& error) {
    const std::string text = fmt::format("open: the system refuses a thread ({})", error.what());
    return encode(ErrorCode::kOutOfMemory, text);
  } catch (const std::exception& error) {
    return encode(ErrorCode::kInternal, error.what());
  }
}

void check_outcome(std::span<const std::byte> outcome, size_t rank, const Context& context) {
  WEFT_CHECK(
      context,
      outcome.empty(),
      static_cast<ErrorCode>(outcome[0]),
      "{}, on rank {}",
      without_place(std::string(text_of(outcome).substr(1))),
      rank
  );
}

void agree(const Group& group, const std::function<void()>& step) {
  const std::vector<Bytes> outcomes = group.all_gather(outcome_of(step));
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    check_outcome(outcomes[rank], rank, context_of(group));
  }
}

void agree_on_name(std::string_view name, const Group& group) {
  const auto names = group.all_gather(std::as_bytes(std::span(name)));
  const std::string_view expected = text_of(names.front());
  for (size_t rank = 0; rank < names.size(); ++rank) {
    const std::string_view theirs = text_of(names[rank]);
    WEFT_CHECK_ARG(
        context_of(group),
        theirs == expected,
        "open: rank {} asks for transport \"{}\" (rank 0 for \"{}\")",
        rank,
        theirs,
        expected
    );
  }
}

}  // namespace weft
