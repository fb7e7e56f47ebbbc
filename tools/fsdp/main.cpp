#include "commands.h"
#include "suggestion.h"

#include <fsdp/version.h>

#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

namespace fsdp::tool {
namespace {

struct Command {
  const char* name;
  const char* summary;
  int (*function)(int argc, char** argv);
};

constexpr Command kCommands[] = {
    {"run", "Start the ranks of a program on this host", run_command}};

void print_help(std::ostream& out) {
  out << "The command-line tool of libfsdp.\n\n"
         "Usage: fsdp COMMAND [OPTIONS]\n\n"
         "Commands:\n";
  for (const Command& command : kCommands) {
    out << "  " << std::left << std::setw(12) << command.name << command.summary
        << "\n";
  }
  out << "\nOptions:\n"
         "  -h,--help   Print this help and exit\n"
         "  --version   Print the version and exit\n\n"
         "`fsdp COMMAND --help` tells more. Example: fsdp run -n 2 -- "
         "./train\n";
}

int unknown_word(const std::string& word) {
  std::vector<std::string> known = {"--help", "--version"};
  for (const Command& command : kCommands) {
    known.emplace_back(command.name);
  }
  std::cerr << "fsdp: there is no " << (word[0] == '-' ? "option" : "command")
            << " '" << word << "'." << did_you_mean(word, known)
            << "\nRun `fsdp --help` for what there is.\n";
  return kUsageError;
}

int run_tool(int argc, char** argv) {
  if (argc < 2) {
    print_help(std::cerr);
    return kUsageError;
  }
  const std::string word = argv[1];
  if (word == "-h" || word == "--help") {
    print_help(std::cout);
    return 0;
  }
  if (word == "--version") {
    std::cout << "fsdp " << FSDP_VERSION_MAJOR << '.' << FSDP_VERSION_MINOR
              << '.' << FSDP_VERSION_PATCH << "\n";
    return 0;
  }
  for (const Command& command : kCommands) {
    if (word == command.name) {
      return command.function(argc - 1, argv + 1);
    }
  }
  return unknown_word(word);
}

} // namespace
} // namespace fsdp::tool

int main(int argc, char** argv) {
  return fsdp::tool::run_tool(argc, argv);
}
