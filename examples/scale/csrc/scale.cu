// Checks the tensors of `scale`, picks the element type and launches.
#include <flashinfer/scale.cuh>

#include "tvm_ffi_utils.h"

using namespace flashinfer;

void scale(TensorView input, TensorView output, float factor) {
  CHECK_INPUT(input);
  CHECK_INPUT(output);
  CHECK_DEVICE(input, output);
  CHECK_SHAPE(output, input);
  CHECK_INPUT_TYPE(output, input.dtype());

  DeviceGuard guard(input.device());
  const cudaStream_t stream = get_stream(input.device());
  DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(input.dtype(), T, [&] {
    const cudaError_t status = launch_scale(input.data_ptr<T>(), output.data_ptr<T>(),
                                            static_cast<T>(factor), input.numel(), stream);
    TVM_FFI_ICHECK(status == cudaSuccess) << "scale failed: " << cudaGetErrorString(status);
    return true;
  });
}
