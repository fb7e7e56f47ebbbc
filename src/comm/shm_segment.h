#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

/// How the ranks of one host find each other.
struct ShmAddress {
  std::string name; // the same for all ranks of a job, and for no other job
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Address space to reserve, at most; less where the system refuses.
  size_t bytes = size_t{1} << 42;
};

/// A piece of memory that the ranks of one host share, zeros at first. Pages
/// take memory once they are touched. Nothing of it has a name in the file
/// system, so nothing is left behind however the ranks end.
class ShmSegment {
 public:
  /// Finds the other ranks, by threads or processes that call this with the
  /// same name and size. Throws CommunicationError that names the ranks that
  /// did not come.
  static std::shared_ptr<ShmSegment> join(const ShmAddress& address);

  /// One for each of `size` ranks that are threads of this process.
  static std::vector<std::shared_ptr<ShmSegment>> for_threads(
      int size,
      size_t bytes);

  virtual ~ShmSegment() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// The same memory twice: to write, and to read only.
  virtual std::byte* data() = 0;
  virtual const std::byte* read_only_data() const = 0;
  virtual size_t bytes() const = 0;

  /// Takes memory for [offset, offset + bytes) now. Throws CommunicationError
  /// that says how much was wanted and is there, instead of a fault later.
  virtual void reserve(size_t offset, size_t bytes) = 0;

  /// Gives the memory of whole pages within [offset, offset + bytes) back to
  /// the system; they read as zeros afterwards.
  virtual void release(size_t offset, size_t bytes) = 0;

  /// Whether the process of `rank` has ended, in whatever way. Never waits.
  virtual bool is_dead(int rank) = 0;

  /// Of a rank, for messages: "pid 4711", "pid 4711, stopped", "pid 4711,
  /// dead".
  virtual std::string describe(int rank) = 0;

  /// Whether this process is a fork of the one that joined: it must not use the
  /// segment, and its memory is not mapped here.
  virtual bool forked() const = 0;
};

} // namespace fsdp::detail
