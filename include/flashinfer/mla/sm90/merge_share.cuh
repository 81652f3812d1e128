// The rows of a tile that a CTA merges (part_merge.cuh).
#pragma once

#include <flashinfer/scheduler/mla_work.h>

namespace flashinfer {

// Rows first, first + step, ... of `num_rows`.
struct MlaMergeShare {
  MlaMerge merge;
  int first, step, num_rows;
};

}  // namespace flashinfer
