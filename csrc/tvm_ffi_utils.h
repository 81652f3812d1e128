/*
 * What an op of your own needs in its `.cu`: tensors, checks, dtype dispatch, stream, device guard.
 *
 * This header costs nvcc about 8 s per file, which is a fair price for writing an op in one place.
 * The ops of this library are split instead: a `.cu` without it, and a binding for the host
 * compiler.
 *
 * A check that fails throws ValueError or TypeError, and names the variable as written in the code:
 * call the parameters of an exported function as the Python function calls them.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <type_traits>

namespace flashinfer {

// A tensor argument. Does not own the memory: valid for the duration of the call.
class TensorView : public tvm::ffi::TensorView {
 public:
  using tvm::ffi::TensorView::data_ptr;
  using tvm::ffi::TensorView::TensorView;
  TensorView(const tvm::ffi::TensorView& view) : tvm::ffi::TensorView(view) {}

  // The first element. T is not checked: it comes from a dispatch on dtype().
  template <typename T>
  T* data_ptr() const {
    return reinterpret_cast<T*>(static_cast<char*>(tvm::ffi::TensorView::data_ptr()) +
                                byte_offset());
  }
  bool is_cuda() const { return device().device_type == kDLCUDA; }
};

// Makes `device` current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(DLDevice device) {
    cudaGetDevice(&previous_);
    changed_ = device.device_type == kDLCUDA && device.device_id != previous_;
    if (changed_ && cudaSetDevice(device.device_id) != cudaSuccess) {
      TVM_FFI_THROW(RuntimeError) << "cannot make CUDA device " << device.device_id << " current";
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// The caller's stream; for a call from PyTorch, PyTorch's current stream.
inline cudaStream_t get_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline cudaStream_t get_current_stream() {
  int device_id = 0;
  cudaGetDevice(&device_id);
  return get_stream(DLDevice{kDLCUDA, device_id});
}

// A tensor on `device` in the caller's framework (its allocator, its ownership).
inline tvm::ffi::Tensor alloc_tensor(tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device) {
  return tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, shape, dtype, device);
}

// A dtype as an integral constant, for switch statements and comparisons.
constexpr int64_t encode_dtype(DLDataType dtype) {
  return (int64_t{dtype.code} << 24) | (int64_t{dtype.bits} << 16) | dtype.lanes;
}

inline constexpr DLDataType dl_float32{kDLFloat, 32, 1};
inline constexpr DLDataType dl_float16{kDLFloat, 16, 1};
inline constexpr DLDataType dl_bfloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType dl_float8_e4m3fn{kDLFloat8_e4m3fn, 8, 1};
inline constexpr DLDataType dl_float8_e5m2{kDLFloat8_e5m2, 8, 1};
inline constexpr DLDataType dl_int8{kDLInt, 8, 1};
inline constexpr DLDataType dl_uint8{kDLUInt, 8, 1};
inline constexpr DLDataType dl_int32{kDLInt, 32, 1};
inline constexpr DLDataType dl_uint32{kDLUInt, 32, 1};
inline constexpr DLDataType dl_int64{kDLInt, 64, 1};
inline constexpr DLDataType dl_uint64{kDLUInt, 64, 1};
inline constexpr DLDataType dl_bool{kDLBool, 8, 1};

}  // namespace flashinfer

// Lets an exported function take a flashinfer::TensorView wherever it may take a tvm::ffi one.
namespace tvm {
namespace ffi {
template <>
struct TypeTraits<flashinfer::TensorView> : TypeTraits<TensorView> {
  static flashinfer::TensorView CopyFromAnyViewAfterCheck(const TVMFFIAny* src) {
    return TypeTraits<TensorView>::CopyFromAnyViewAfterCheck(src);
  }
  static std::optional<flashinfer::TensorView> TryCastFromAnyView(const TVMFFIAny* src) {
    return TypeTraits<TensorView>::TryCastFromAnyView(src);
  }
};
}  // namespace ffi
}  // namespace tvm

using flashinfer::alloc_tensor;
using flashinfer::DeviceGuard;
using flashinfer::get_current_stream;
using flashinfer::get_stream;
using flashinfer::TensorView;
using tvm::ffi::Tensor;

// --- Checks -------------------------------------------------------------------------------------

#define CHECK_CUDA(x)                                            \
  TVM_FFI_CHECK((x).device().device_type == kDLCUDA, ValueError) \
      << #x " must be a CUDA tensor, got one on device type " << (x).device().device_type

#define CHECK_CPU(x)                                            \
  TVM_FFI_CHECK((x).device().device_type == kDLCPU, ValueError) \
      << #x " must be a CPU tensor, got one on device type " << (x).device().device_type

#define CHECK_CONTIGUOUS(x) \
  TVM_FFI_CHECK((x).IsContiguous(), ValueError) << #x " must be contiguous"

#define CHECK_LAST_DIM_CONTIGUOUS(x)                                                      \
  TVM_FFI_CHECK((x).ndim() > 0 && ((x).stride(-1) == 1 || (x).size(-1) == 1), ValueError) \
      << #x " must be contiguous in its last dimension"

// The usual requirement: a contiguous tensor on a GPU.
#define CHECK_INPUT(x)   \
  do {                   \
    CHECK_CUDA(x);       \
    CHECK_CONTIGUOUS(x); \
  } while (0)

#define CHECK_LAST_DIM_CONTIGUOUS_INPUT(x) \
  do {                                     \
    CHECK_CUDA(x);                         \
    CHECK_LAST_DIM_CONTIGUOUS(x);          \
  } while (0)

#define CHECK_INPUT_TYPE(x, type)                 \
  TVM_FFI_CHECK((x).dtype() == (type), TypeError) \
      << #x " must have dtype " << (type) << ", got " << (x).dtype()

#define CHECK_INPUT_AND_TYPE(x, type) \
  do {                                \
    CHECK_INPUT(x);                   \
    CHECK_INPUT_TYPE(x, type);        \
  } while (0)

#define CHECK_DIM(number, x)                        \
  TVM_FFI_CHECK((x).ndim() == (number), ValueError) \
      << #x " must have " << (number) << " dimensions, got " << (x).ndim()

#define CHECK_SHAPE(a, b)                                                         \
  do {                                                                            \
    CHECK_DIM((b).ndim(), a);                                                     \
    for (int dim_idx = 0; dim_idx < (a).ndim(); ++dim_idx) {                      \
      TVM_FFI_CHECK((a).size(dim_idx) == (b).size(dim_idx), ValueError)           \
          << #a " must have the shape of " #b ": dimension " << dim_idx << " is " \
          << (a).size(dim_idx) << ", expected " << (b).size(dim_idx);             \
    }                                                                             \
  } while (0)

#define CHECK_DEVICE(a, b)                                              \
  TVM_FFI_CHECK((a).device().device_type == (b).device().device_type && \
                    (a).device().device_id == (b).device().device_id,   \
                ValueError)                                             \
      << #a " and " #b " must be on the same device"

#define CHECK_EQ(a, b) TVM_FFI_CHECK_EQ(a, b, ValueError)
#define CHECK_GE(a, b) TVM_FFI_CHECK_GE(a, b, ValueError)
#define CHECK_GQA_HEAD_DIVISIBLE(num_qo_heads, num_kv_heads)                                      \
  TVM_FFI_CHECK((num_qo_heads) % (num_kv_heads) == 0, ValueError)                                 \
      << #num_qo_heads " (" << (num_qo_heads) << ") must be a multiple of " << #num_kv_heads " (" \
      << (num_kv_heads) << ")"

// --- Dispatch -----------------------------------------------------------------------------------
//
//   DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(input.dtype(), DType, [&] { ...; return true; });
//
// runs the lambda with DType defined as the C++ type of the tensor's dtype, and evaluates to what
// the lambda returns. Any other dtype throws TypeError.

#define FLASHINFER_DISPATCH_CASE(dl_dtype, type, c_type, ...) \
  case ::flashinfer::encode_dtype(dl_dtype): {                \
    using c_type = type;                                      \
    return __VA_ARGS__();                                     \
  }

#define FLASHINFER_DISPATCH_DTYPE(dl_dtype, allowed, ...)                                        \
  [&] {                                                                                          \
    switch (::flashinfer::encode_dtype(dl_dtype)) {                                              \
      __VA_ARGS__                                                                                \
      default:                                                                                   \
        TVM_FFI_THROW(TypeError) << #dl_dtype " must be one of " allowed ", got " << (dl_dtype); \
        TVM_FFI_UNREACHABLE();                                                                   \
    }                                                                                            \
  }()

#define FLASHINFER_CASES_FP16(c_type, ...)                                      \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_float16, half, c_type, __VA_ARGS__) \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_bfloat16, __nv_bfloat16, c_type, __VA_ARGS__)
#define FLASHINFER_CASES_FP32(c_type, ...) \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_float32, float, c_type, __VA_ARGS__)
#define FLASHINFER_CASES_FP8(c_type, ...)                                                      \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_float8_e4m3fn, __nv_fp8_e4m3, c_type, __VA_ARGS__) \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_float8_e5m2, __nv_fp8_e5m2, c_type, __VA_ARGS__)
#define FLASHINFER_CASES_INT(c_type, ...)                                        \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_int32, int32_t, c_type, __VA_ARGS__) \
  FLASHINFER_DISPATCH_CASE(::flashinfer::dl_int64, int64_t, c_type, __VA_ARGS__)

#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16(dl_dtype, c_type, ...) \
  FLASHINFER_DISPATCH_DTYPE(dl_dtype, "float16, bfloat16",         \
                            FLASHINFER_CASES_FP16(c_type, __VA_ARGS__))

#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(dl_dtype, c_type, ...) \
  FLASHINFER_DISPATCH_DTYPE(dl_dtype, "float32, float16, bfloat16",     \
                            FLASHINFER_CASES_FP32(c_type, __VA_ARGS__)  \
                                FLASHINFER_CASES_FP16(c_type, __VA_ARGS__))

#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP8(dl_dtype, c_type, ...)   \
  FLASHINFER_DISPATCH_DTYPE(dl_dtype, "float8_e4m3fn, float8_e5m2", \
                            FLASHINFER_CASES_FP8(c_type, __VA_ARGS__))

#define DISPATCH_DLPACK_DTYPE_TO_CTYPE(dl_dtype, c_type, ...)                          \
  FLASHINFER_DISPATCH_DTYPE(dl_dtype, "float16, bfloat16, float8_e4m3fn, float8_e5m2", \
                            FLASHINFER_CASES_FP16(c_type, __VA_ARGS__)                 \
                                FLASHINFER_CASES_FP8(c_type, __VA_ARGS__))

#define DISPATCH_DLPACK_IDTYPE_TO_CTYPE(dl_dtype, c_type, ...) \
  FLASHINFER_DISPATCH_DTYPE(dl_dtype, "int32, int64", FLASHINFER_CASES_INT(c_type, __VA_ARGS__))

#define DISPATCH_BOOL(value, constant, ...) \
  [&] {                                     \
    if (value) {                            \
      constexpr bool constant = true;       \
      return __VA_ARGS__();                 \
    } else {                                \
      constexpr bool constant = false;      \
      return __VA_ARGS__();                 \
    }                                       \
  }()
