#include "scale.cu"
#include "tvm_ffi_utils.h"

// Python calls it as `module.run(input, output, factor)`.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, scale_launcher);
