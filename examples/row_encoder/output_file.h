#pragma once

#include <fstream>
#include <ostream>
#include <string>

namespace row_encoder {

/// A file that an option names. Its folder is made; without a name what is
/// written is dropped.
class OutputFile {
 public:
  /// Throws UsageError, which names `option`, if the file cannot be opened.
  OutputFile(std::string path, const std::string& option);

  std::ostream& stream() { return file_; }

  /// Throws std::runtime_error if something could not be written.
  void close();

 private:
  std::string path_;
  std::ofstream file_;
};

} // namespace row_encoder
