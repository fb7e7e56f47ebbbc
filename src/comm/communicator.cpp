#include <fsdp/communicator.h>

#include <stdexcept>

namespace fsdp {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  throw std::invalid_argument("size_of: not a DType");
}

} // namespace fsdp
