#include <flashinfer/scale.cuh>

#include "tvm_ffi_utils.h"

using namespace flashinfer;

void scale_launcher(TensorView input, TensorView output, float factor) {
  CHECK_INPUT(input);
  CHECK_INPUT(output);
  CHECK_DEVICE(input, output);
  CHECK_SHAPE(output, input);
  if (input.dtype() != output.dtype()) {
    TVM_FFI_THROW(TypeError) << "output must have the dtype of input, " << input.dtype() << ", got "
                             << output.dtype();
  }

  DeviceGuard guard(input.device());
  cudaStream_t stream = get_stream(input.device());
  DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(input.dtype(), DType, [&] {
    cudaError_t status = ScaleLauncher<DType>(input.data_ptr<DType>(), output.data_ptr<DType>(),
                                              static_cast<DType>(factor), input.numel(), stream);
    TVM_FFI_ICHECK(status == cudaSuccess)
        << "Failed to run ScaleLauncher: " << cudaGetErrorString(status);
    return true;
  });
}
