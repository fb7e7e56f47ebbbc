# fsdp_warnings: linked privately by every target of this project.

add_library(fsdp_warnings INTERFACE)
target_compile_options(
  fsdp_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
  $<$<BOOL:${FSDP_WERROR}>:-Werror>)
