# Applies FSDP_SANITIZE to everything that is compiled after this point.

if(FSDP_SANITIZE)
  if(FSDP_SANITIZE STREQUAL "address;undefined" OR FSDP_SANITIZE STREQUAL "thread")
    string(REPLACE ";" "," _sanitizers "${FSDP_SANITIZE}")
  else()
    message(FATAL_ERROR
      "FSDP_SANITIZE is '${FSDP_SANITIZE}': expected 'address;undefined' or 'thread'.")
  endif()
  add_compile_options(
    -fsanitize=${_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${_sanitizers})
endif()
