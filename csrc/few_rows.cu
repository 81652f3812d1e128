#include "few_rows.h"

#include <flashinfer/gemm/few_rows.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t few_rows(const FewRowsParams& params, bool enable_pdl, cudaStream_t stream) {
  using Traits = FewRowsTraits<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_COLUMNS,
                               FewRowsOutput::FLASHINFER_CFG_OUTPUT>;
  return launch_few_rows<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
