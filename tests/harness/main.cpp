#include "harness/job.h"

int main(int argc, char** argv) {
  return fsdp::testing::run_all_tests(argc, argv);
}
