#include "output_file.h"

#include "settings.h"

#include <filesystem>

namespace row_encoder {

OutputFile::OutputFile(std::string path, const std::string& option)
    : path_(std::move(path)) {
  if (path_.empty()) {
    return;
  }
  std::error_code error; // an unusable folder shows when the file is opened
  std::filesystem::create_directories(
      std::filesystem::path(path_).parent_path(), error);
  file_.open(path_);
  if (!file_) {
    throw UsageError(option + ": cannot write to '" + path_ + "'.");
  }
}

void OutputFile::close() {
  if (path_.empty()) {
    return;
  }
  file_.close();
  if (!file_) {
    throw std::runtime_error("'" + path_ + "' could not be written.");
  }
}

} // namespace row_encoder
