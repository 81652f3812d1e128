// Which kernels answer which call, and where they are. Rows hold probabilities or logits.
//
//   call                                     kernels                              header
//   softmax of logits                        tile sums; weight / total            softmax/softmax.cuh
//   token, no filter                         tile sums; finish                    draw/stream.cuh
//   token, top-k, with or without top-p      tile sums and maxima; finish         draw/stream.cuh
//   token, top-p, from probabilities         halves; propose; list; settle        top_p/nucleus.cuh
//   any other filter, probabilities or mask  one: a cluster of CTAs holds the row row/sampling.cuh
//   values and indices of the k largest      one: a cluster of CTAs holds the row top_k/topk.cuh
//     of long rows                           bound; collect; choose               top_k/stream.cuh
//   accepted tokens of a draft               one: a cluster of CTAs holds the row draw/speculative.cuh
//
// A folder includes only folders above it:
//
//   row/                      a row in a cluster's shared memory or cut to tiles: maxima, the
//                             search for its k-th largest element or its nucleus, weights, random bits
//   softmax/ top_p/ top_k/    one operation each
//   draw/                     operations that need several of these
//
// csrc/sampling.cu chooses, with samples_by_stream() of sampling_params.h.
#pragma once

#include <flashinfer/sampling/draw/stream.cuh>
#include <flashinfer/sampling/row/sampling.cuh>
#include <flashinfer/sampling/softmax/softmax.cuh>
#include <flashinfer/sampling/top_p/nucleus.cuh>
