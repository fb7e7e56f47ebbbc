#pragma once

#include <torch/torch.h>

#include <string>

namespace row_encoder {

/// Rows with their labels.
struct Examples {
  at::Tensor x; // (rows, columns), float
  at::Tensor y; // (rows), int64

  int64_t rows() const { return x.size(0); }
  Examples select(const at::Tensor& rows) const;
};

/// What is learned from, and what is only looked at in the end.
struct Dataset {
  Examples train;
  Examples held_out;
};

/// Reads lines of comma separated numbers: 0 to 16 for each pixel, then a label
/// from 0 to 9. Pixels are scaled to 0 to 1. Throws std::runtime_error, with
/// the line, for a file that is anything else.
Examples read_table(const std::string& path);

/// Holds out every fifth row of each label: the same rows in every run.
Dataset split(const Examples& all);

/// The share of held-out rows that are nearest to the mean row of their label:
/// what a model of any worth has to beat.
double nearest_centroid_accuracy(const Dataset& data, int64_t classes);

} // namespace row_encoder
