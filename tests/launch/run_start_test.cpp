// How ranks start: arguments, environment, streams, processors.

#include "launch/cpu_binding.h"
#include "tool_process.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <set>
#include <sstream>

namespace fsdp::detail {
namespace {

struct UsageError {
  std::vector<std::string> arguments;
  std::string message;
};

TEST(RunStart, WrongUsageIsExplainedAndGives2) {
  const std::vector<UsageError> errors = {
      {{}, "Usage: fsdp COMMAND"},
      {{"rnu"}, "fsdp: there is no command 'rnu'. Did you mean 'run'?"},
      {{"--versoin"}, "no option '--versoin'. Did you mean '--version'?"},
      {{"run", "--", "true"}, "-n N, the number of ranks, is required"},
      {{"run", "-n", "2"}, "a program: fsdp run -n N [OPTIONS] -- PROGRAM"},
      {{"run", "-n", "0", "--", "true"}, "Value 0 not in range 1 to 4096"},
      {{"run", "-n", "two", "--", "true"}, "two"},
      {{"run", "-n", "2", "--thread", "2", "--", "true"},
       "there is no option '--thread'. Did you mean '--threads'?"},
      {{"run", "-n", "2", "--bind", "cores", "--", "true"},
       "cores not in {auto,core,none,socket}"},
      {{"run", "-n", "2", "--backend", "mpi", "--", "true"},
       "mpi not in {shm,gloo}"},
      {{"run", "-n", "2", "--timeout", "-1", "--", "true"}, "--timeout"},
      {{"run", "-n", "2", "--threads", "0", "--", "true"}, "--threads"}};
  for (const UsageError& error : errors) {
    ToolProcess tool(error.arguments);
    EXPECT_EQ(tool.wait(), 2) << error.message;
    EXPECT_EQ(count_of(error.message, tool.err()), 1)
        << "expected: " << error.message << "\ngot: " << tool.err();
    EXPECT_EQ(tool.out(), "");
  }
}

TEST(RunStart, HelpAndVersionGoToStdout) {
  for (const auto& [arguments, text] :
       {std::pair<std::vector<std::string>, std::string>{
            {"--version"}, "fsdp "},
        {{"--help"}, "Start the ranks of a program"},
        {{"run", "--help"}, "fsdp run -n 2 -- ./train"}}) {
    ToolProcess tool(arguments);
    EXPECT_EQ(tool.wait(), 0);
    EXPECT_NE(tool.out().find(text), std::string::npos) << tool.out();
    EXPECT_EQ(tool.err(), "");
  }
}

TEST(RunStart, ArgumentsReachTheProgramAsTheyAre) {
  for (const bool with_mark : {true, false}) {
    std::vector<std::string> arguments = {"run", "-n", "1"};
    if (with_mark) {
      arguments.emplace_back("--");
    }
    for (const char* word :
         {"printf", "<%s>", "-n", "--", "a b", "--help", ""}) {
      arguments.emplace_back(word);
    }
    ToolProcess tool(arguments);
    EXPECT_EQ(tool.wait(), 0) << tool.err();
    EXPECT_EQ(tool.out(), "<-n><--><a b><--help><>");
  }
}

TEST(RunStart, EightRanksKnowWhoTheyAre) {
  ToolProcess tool(run_script(
      8,
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK"
      " $MASTER_ADDR $LIBFSDP_BACKEND $LIBFSDP_TIMEOUT $OMP_NUM_THREADS",
      {"--backend", "gloo", "--timeout", "2.5", "--threads", "3"}));
  EXPECT_EQ(tool.wait(), 0);
  for (int rank = 0; rank < 8; ++rank) {
    std::ostringstream line;
    line << '[' << rank << "] " << rank << ' ' << rank
         << " 8 8 0 127.0.0.1 gloo 2.5 3\n";
    EXPECT_EQ(count_of(line.str(), tool.out()), 1) << line.str() << tool.out();
  }
}

TEST(RunStart, AJobHasOnePortAndANameOfItsOwn) {
  std::set<std::string> jobs;
  for (int i = 0; i < 2; ++i) {
    ToolProcess tool(
        run_script(2, "echo $MASTER_PORT $LIBFSDP_JOB", {"--no-prefix"}));
    EXPECT_EQ(tool.wait(), 0);
    const std::string out = tool.out();
    const std::string first = out.substr(0, out.find('\n') + 1);
    EXPECT_EQ(out, first + first);
    jobs.insert(first.substr(first.find(' ')));
  }
  EXPECT_EQ(jobs.size(), 2u);
}

TEST(RunStart, StdinIsOfRankZeroAlone) {
  ToolProcess tool(run_script(2, "echo \"<$(cat)>\""), {.input = "for rank 0"});
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(count_of("[0] <for rank 0>\n", tool.out()), 1) << tool.out();
  EXPECT_EQ(count_of("[1] <>\n", tool.out()), 1) << tool.out();
}

std::string output_of(const std::string& command) {
  FILE* const pipe = ::popen(command.c_str(), "re");
  std::string output;
  char buffer[256];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) {
    output += buffer;
  }
  ::pclose(pipe);
  return output;
}

TEST(RunStart, RanksInheritNoDescriptorOfTheLauncher) {
  const std::string list = "echo $(ls /proc/self/fd)";
  const std::string usual = output_of(list);
  ToolProcess tool(run_script(3, list));
  EXPECT_EQ(tool.wait(), 0);
  for (int rank = 0; rank < 3; ++rank) {
    const std::string line = "[" + std::to_string(rank) + "] " + usual;
    EXPECT_EQ(count_of(line, tool.out()), 1) << usual << tool.out();
  }
}

TEST(RunStart, RanksBlockAndIgnoreNoSignals) {
  ToolProcess tool(run_script(
      2, "grep -E 'Sig(Blk|Ign)' /proc/self/status", {"--no-prefix"}));
  EXPECT_EQ(tool.wait(), 0);
  std::istringstream lines(tool.out());
  int count = 0;
  std::string name;
  for (std::string mask; lines >> name >> mask; ++count) {
    // The two that belong to the C library are as this process inherits them.
    EXPECT_EQ(std::stoull(mask, nullptr, 16) & ~0x180000000ULL, 0u)
        << name << mask;
  }
  EXPECT_EQ(count, 4);
}

TEST(RunStart, BindCoreGivesEachRankItsOwnProcessors) {
  const std::vector<Cpu> cpus = allowed_cpus();
  if (cpus.size() != 2) {
    GTEST_SKIP() << "needs 2 processors, there are " << cpus.size();
  }
  ToolProcess tool(run_script(
      2, "grep Cpus_allowed_list /proc/self/status", {"--bind", "core"}));
  EXPECT_EQ(tool.wait(), 0);
  for (const int rank : {0, 1}) {
    const auto& cpu = cpus[static_cast<size_t>(rank)];
    const std::string line = "[" + std::to_string(rank) +
        "] Cpus_allowed_list:\t" + std::to_string(cpu.id) + "\n";
    EXPECT_EQ(count_of(line, tool.out()), 1) << tool.out();
  }
}

} // namespace
} // namespace fsdp::detail
