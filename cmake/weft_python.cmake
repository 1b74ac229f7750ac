# SPDX-License-Identifier: Apache-2.0
# The distribution's python3, which has the pytest and numpy that scripts/setup installs; another one
# that comes first in PATH may lack them.
find_program(WEFT_PYTHON python3 PATHS /usr/bin NO_DEFAULT_PATH)
find_program(WEFT_PYTHON python3 REQUIRED)

# weft_pytest(NAME file.py [LABELS ...] [TIMEOUT seconds] [ENVIRONMENT A=b ...]): one CTest entry.
function(weft_pytest name file)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_test(NAME ${name} COMMAND ${WEFT_PYTHON} -m pytest -q -p no:cacheprovider ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
                       ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1;${ARG_ENVIRONMENT}")
endfunction()
