# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=... -DOUTPUT=... [-DCOMMIT=...] -P commit.cmake: writes the commit of the sources, only when it changed.
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
execute_process(COMMAND git -C ${SOURCE} status --porcelain --untracked-files=no
  OUTPUT_VARIABLE changes OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
set(dirty false)
if(changes)
  set(dirty true)
endif()
if(COMMIT)  # sources without their history; "-dirty" behind it says that they are not quite that commit
  string(REGEX REPLACE "-dirty$" "" commit ${COMMIT})
  set(dirty false)
  if(NOT commit STREQUAL COMMIT)
    set(dirty true)
  endif()
endif()
set(text "#define WEFT_COMMIT \"${commit}\"\n#define WEFT_DIRTY ${dirty}\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT text STREQUAL old)
  file(WRITE ${OUTPUT} "${text}")
endif()
