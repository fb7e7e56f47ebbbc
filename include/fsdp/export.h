#pragma once

/// Marks what the shared library exports; everything else stays hidden.
#define FSDP_API __attribute__((visibility("default")))
