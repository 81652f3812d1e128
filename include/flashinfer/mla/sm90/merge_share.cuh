// What a CTA merges of a tile (part_merge.cuh).
#pragma once

#include <flashinfer/scheduler/mla_work.h>

namespace flashinfer {

// Rows first, first + step, ... of `num_rows`.
struct MlaMergeShare {
  MlaMerge merge;
  int first, step, num_rows;
};

}  // namespace flashinfer
