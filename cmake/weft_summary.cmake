# SPDX-License-Identifier: Apache-2.0
# weft_note("MPI: not found, ..."): one line of the summary that ends configuration.
function(weft_note text)
  set_property(GLOBAL APPEND PROPERTY WEFT_NOTES "${text}")
endfunction()

function(weft_print_summary)
  set(asserts "assertions off")
  if(WEFT_ASSERT)
    set(asserts "assertions on")
  endif()
  set(sanitizers "")
  if(WEFT_SANITIZE)
    set(sanitizers ", sanitizers ${WEFT_SANITIZE}")
  endif()
  message(STATUS "weft ${PROJECT_VERSION}: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, "
                 "${CMAKE_BUILD_TYPE}, ${asserts}${sanitizers}")
  get_property(notes GLOBAL PROPERTY WEFT_NOTES)
  foreach(note IN LISTS notes)
    message(STATUS "  ${note}")
  endforeach()
endfunction()
