#pragma once

#include <functional>
#include <optional>
#include <string>

/// What the modes of fault_rank have in common.
namespace fsdp::testing {

/// Status of a rank after an error that names a failure of the job.
constexpr int kFailed = 3;

/// Takes the arguments, of the form KEY=VALUE.
void set_arguments(int count, char** words);
const std::string& argument(const std::string& key);
std::string argument_or(const std::string& key, const std::string& otherwise);
int number(const std::string& key);

/// As the launcher says.
int own_rank();
int all_ranks();

/// One line of stdout, at once.
void say(const std::string& line);

/// Milliseconds of the clock that all processes of this host share.
std::string now_ms();

std::string one_line(std::string text);

/// Waits for the file `name` in the folder of the job.
void await_file(const std::string& name);

/// Waits for the other ranks: loading libtorch takes each of them a different
/// time, which is no part of a limit.
void meet();

/// The text of the error, if it is of the type that is documented for failures
/// of peers.
std::optional<std::string> failure_of(const std::function<void()>& call);

/// Says that what `where` names has failed, and returns the status to exit
/// with; 0 if there is no failure.
int status_of(
    const std::optional<std::string>& failure,
    const std::string& where);

int open_descriptors();
int views_of_shared_memory();

// Ranks that take different paths; see paths.cpp.
int idle_mode();
int branches_mode();
int batches_mode();

} // namespace fsdp::testing
