#include "launch/output_sink.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

namespace fsdp::detail {
namespace {

class OutputSinkTest : public testing::Test {
 protected:
  OutputSinkTest() {
    int ends[2] = {};
    EXPECT_EQ(::pipe(ends), 0);
    reader_ = UniqueFd(ends[0]);
    writer_ = UniqueFd(ends[1]);
  }

  UniqueFd reader_;
  UniqueFd writer_;
};

TEST_F(OutputSinkTest, TakesEverythingAndNeverWaits) {
  OutputSink sink(writer_.get());
  std::string text;
  for (int i = 0; i < 300'000; ++i) {
    text += std::to_string(i) + "\n";
  }
  sink.write(text);
  sink.flush();
  EXPECT_TRUE(sink.pending());
  EXPECT_TRUE(sink.full());

  std::string read;
  std::string buffer(10'000, '\0');
  while (read.size() < text.size()) {
    const ssize_t bytes = ::read(reader_.get(), buffer.data(), buffer.size());
    ASSERT_GT(bytes, 0);
    read.append(buffer, 0, static_cast<size_t>(bytes));
    sink.flush();
  }
  EXPECT_EQ(read, text);
  EXPECT_FALSE(sink.pending());
  EXPECT_FALSE(sink.full());
}

TEST_F(OutputSinkTest, LeavesTheStreamOfOthersAsItIs) {
  OutputSink sink(writer_.get());
  EXPECT_EQ(::fcntl(writer_.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(OutputSinkTest, ClosesWhenTheReaderHasGone) {
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  OutputSink sink(writer_.get());
  reader_.reset();
  sink.write("text");
  EXPECT_FALSE(sink.closed());
  sink.flush();
  EXPECT_TRUE(sink.closed());
  EXPECT_FALSE(sink.pending());
  sink.write("more");
  EXPECT_FALSE(sink.pending());
  std::signal(SIGPIPE, before);
}

} // namespace
} // namespace fsdp::detail
