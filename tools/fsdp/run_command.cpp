#include "commands.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"
#include "suggestion.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace fsdp::tool {
namespace {

constexpr int kMostRanks = 4096;
constexpr double kMostSeconds = 1e6;

constexpr const char* kExamples = R"(Examples:
  fsdp run -n 2 -- ./train --epochs 3
  fsdp run -n 4 --threads 2 --bind core -- ./train
  fsdp run -n 2 --log-dir logs -- ./train     (logs/rank-0.log, logs/rank-1.log)
  fsdp run -n 1 --no-prefix -- gdb --args ./train

Exit code: 0 when all ranks exit with 0, else that of the rank that failed
first (128 + n for signal n), 2 for wrong usage, 127 when the program is not
found and 126 when it cannot be executed.)";

struct Arguments {
  detail::LaunchOptions launch;
  bool no_prefix = false;
  double grace_s = 5;
  double timeout_s = 0;
  int threads = 0;
  std::string binding = "auto";
  std::string backend;
};

const std::map<std::string, detail::Binding> kBindings = {
    {"auto", detail::Binding::kAuto},
    {"core", detail::Binding::kCore},
    {"none", detail::Binding::kNone},
    {"socket", detail::Binding::kSocket}};

void add_job_options(CLI::App& app, Arguments& arguments) {
  app.add_option(
         "-n,--ranks", arguments.launch.ranks, "Number of ranks; required")
      ->type_name("N")
      ->check(CLI::Range(1, kMostRanks));
  app.add_option(
         "--threads",
         arguments.threads,
         "OMP_NUM_THREADS of each rank. Default: what the environment says, or "
         "else the processors divided by the ranks")
      ->type_name("T")
      ->check(CLI::Range(1, kMostRanks));
  app.add_option(
         "--bind",
         arguments.binding,
         "Which processors a rank may use: 'core' its own share, 'socket' "
         "those "
         "of one socket, 'none' all, 'auto' (default) a socket where the ranks "
         "divide evenly over several, else all")
      ->type_name("WHERE")
      ->check(CLI::IsMember({"auto", "core", "none", "socket"}));
  app.add_option(
         "--backend", arguments.backend, "Sets LIBFSDP_BACKEND: shm or gloo")
      ->type_name("NAME")
      ->check(CLI::IsMember({"shm", "gloo"}));
  app.add_option(
         "--timeout",
         arguments.timeout_s,
         "Sets LIBFSDP_TIMEOUT: the longest wait of a rank for its peers")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.001, kMostSeconds));
}

void add_launcher_options(CLI::App& app, Arguments& arguments) {
  app.add_option(
         "--log-dir",
         arguments.launch.log_dir,
         "Write what a rank prints to DIR/rank-R.log, and nothing here")
      ->type_name("DIR");
  app.add_flag(
      "--no-prefix",
      arguments.no_prefix,
      "Let the ranks print here themselves, without '[rank] ' before each "
      "line. "
      "Default for one rank");
  app.add_option(
         "--grace",
         arguments.grace_s,
         "How long ranks have after Ctrl-C or SIGTERM before they are killed. "
         "Default: 5")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.0, kMostSeconds));
}

// The program and its arguments: after "--", or from the first word on that is
// no option.
std::vector<std::string> parse(CLI::App& app, int argc, char** argv) {
  char** const end = argv + argc;
  char** const mark = std::find(argv, end, std::string_view("--"));
  app.parse(static_cast<int>(mark - argv), argv);
  std::vector<std::string> program = app.remaining();
  if (!program.empty() && program.front().starts_with('-')) {
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) {
        known.push_back("--" + name);
      }
    }
    const std::string word =
        program.front().substr(0, program.front().find('='));
    throw CLI::ParseError(
        "there is no option '" + word + "'." + did_you_mean(word, known),
        CLI::ExitCodes::ExtrasError);
  }
  if (app.count("-n") == 0) {
    throw CLI::RequiredError("-n N, the number of ranks,");
  }
  program.insert(
      program.end(), program.empty() ? mark + (mark != end) : mark, end);
  if (program.empty()) {
    throw CLI::RequiredError(
        "a program: fsdp run -n N [OPTIONS] -- PROGRAM ...");
  }
  return program;
}

detail::LaunchOptions launch_options(const CLI::App& app, Arguments arguments) {
  detail::LaunchOptions& launch = arguments.launch;
  launch.binding = kBindings.at(arguments.binding);
  launch.grace =
      std::chrono::milliseconds(static_cast<int64_t>(arguments.grace_s * 1000));
  if (arguments.threads > 0) {
    launch.threads = arguments.threads;
  }
  if (!arguments.backend.empty()) {
    launch.backend = arguments.backend;
  }
  if (arguments.timeout_s > 0) {
    // As it was written: the ranks read the same number.
    launch.timeout_s = app.get_option("--timeout")->results().front();
  }
  if (!launch.log_dir.empty()) {
    launch.output = detail::OutputMode::kFiles;
  } else if (arguments.no_prefix || launch.ranks == 1) {
    launch.output = detail::OutputMode::kInherited;
  }
  return launch;
}

} // namespace

int run_command(int argc, char** argv) {
  CLI::App app(
      "Starts N ranks of a program on this host and waits for them. Ctrl-C and "
      "other signals are passed on; when one rank fails, all are ended.",
      "fsdp run");
  app.footer(kExamples);
  app.prefix_command();
  Arguments arguments;
  add_job_options(app, arguments);
  add_launcher_options(app, arguments);
  try {
    arguments.launch.program = parse(app, argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return 0;
  } catch (const CLI::Error& error) {
    std::cerr << "fsdp run: " << error.what()
              << "\nRun `fsdp run --help` for more.\n";
    return kUsageError;
  }
  try {
    return detail::Launcher(launch_options(app, arguments)).run();
  } catch (const detail::LaunchError& error) {
    std::cerr << "fsdp run: " << error.what() << "\n";
    return error.exit_code();
  }
}

} // namespace fsdp::tool
