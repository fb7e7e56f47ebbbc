#pragma once

#include <cstdint>

extern "C" {

/// Bytes that the CPU tensors of this process hold now.
int64_t bench_live_bytes();

/// The most that they held since bench_reset_peak().
int64_t bench_peak_bytes();
void bench_reset_peak();
}
