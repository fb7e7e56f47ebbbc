# The back ends over c10d::Backend: the one part of comm that includes torch, and
# so belongs to fsdp_objects. Included by ../CMakeLists.txt.

target_sources(
  fsdp_objects
  PRIVATE
  comm/c10d_backend.cpp
  comm/c10d_channel.cpp
  comm/c10d_channel_waits.cpp
  comm/c10d_communicator.cpp
  comm/c10d_group.cpp
  comm/c10d_marks.cpp
  comm/c10d_operation.cpp
  comm/c10d_plans.cpp
  comm/c10d_polling_store.cpp
  comm/c10d_records.cpp
  comm/c10d_rendezvous.cpp
  comm/c10d_transport.cpp
  comm/c10d_world.cpp
  comm/gloo_backend.cpp
  comm/gloo_communicator.cpp
  comm/gloo_sockets.cpp)
# ProcessGroupGloo.hpp needs Gloo's headers; no other file shall see ours.
set_source_files_properties(
  comm/gloo_backend.cpp
  PROPERTIES
  SKIP_UNITY_BUILD_INCLUSION ON
  COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
  INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/gloo_headers")
