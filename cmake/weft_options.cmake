# SPDX-License-Identifier: Apache-2.0
option(WEFT_TESTS "Build the tests" ON)
option(WEFT_ASSERT "Check internal invariants" ON)
set(WEFT_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize= (address,undefined or thread)")

# Flags of our own targets only. Contraction is off because sums must be the same bits on every machine.
add_library(weft_flags INTERFACE)
target_compile_options(weft_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Werror -ffp-contract=off)
if(WEFT_ASSERT)
  target_compile_definitions(weft_flags INTERFACE WEFT_ENABLE_ASSERT)
endif()
if(WEFT_SANITIZE)
  add_compile_options(-fsanitize=${WEFT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${WEFT_SANITIZE})
endif()
