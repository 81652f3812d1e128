// TVM-FFI for bindings, on its C ABI: arguments taken by name, checks whose message names the
// argument, its value and the allowed values, and the export macro.
//
// It uses the C ABI instead of the C++ API of tvm/ffi/tvm_ffi.h for two reasons: that header costs
// the host compiler 2.3 s per unit and this one 0.4 s, and its conversion errors name an argument's
// position instead of the argument. Users' ops may use either; tvm_ffi_utils.h is for the C++ API.
//
//   FLASHINFER_FFI_EXPORT(rmsnorm, args) {
//     const ffi::Tensor out = args.tensor("out"), input = args.tensor("input");
//     const float eps = args.float32("eps", ffi::Zero::allowed);
//     args.all_taken();
//     ffi::check_dtype(input, ffi::dtype::bfloat16);
//     ...
//   }
//
// Checks throw; FLASHINFER_FFI_EXPORT turns that into the Python exception. Check the device last:
// everything before it can then be tested on a machine without a GPU. An export takes at most 12
// arguments: what belongs together comes as one tuple (Args::group).
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cmath>
#include <cstdint>
#include <flashinfer/common/device_info.h>

#include "ffi_checks.h"
#include "ffi_tensor.h"

namespace flashinfer::ffi {

// Whether a number that has to be positive may also be zero.
enum class Zero { refused, allowed };

// The arguments of one call, or the elements of a tuple among them, taken in order.
class Args {
 public:
  Args(const TVMFFIAny* values, int64_t count) : values_(values), count_(count) {}

  Tensor tensor(const char* name) {
    const Tensor result = optional_tensor(name);
    if (!result) raise_type(name, "a torch.Tensor", last());
    return result;
  }

  // None gives an empty Tensor, which converts to false.
  Tensor optional_tensor(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFINone) return {nullptr, name};
    if (!is_tensor(value)) raise_type(name, "a torch.Tensor", value);
    return {as_tensor(value), name};
  }

  bool next_is_tensor() const { return used_ < count_ && is_tensor(values_[used_]); }

  double number(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFIFloat) return value.v_float64;
    if (value.type_index == kTVMFFIInt) return static_cast<double>(value.v_int64);
    raise_type(name, "a number", value);
  }

  // Accepts `low` to `high`, both included.
  double number_in(const char* name, double low, double high) {
    const double value = number(name);
    if (!(value >= low && value <= high)) {
      raise("ValueError", "`%s` must be from %g to %g, got %g", name, low, high, value);
    }
    return value;
  }

  // A finite number that is positive, or at least zero if `zero` allows it.
  double positive(const char* name, Zero zero = Zero::refused) {
    const double value = number(name);
    const bool fits = zero == Zero::allowed ? value >= 0. : value > 0.;
    if (!fits || std::isinf(value)) {
      raise("ValueError", "`%s` must be %s and finite, got %g", name,
            zero == Zero::allowed ? "not negative" : "positive", value);
    }
    return value;
  }

  // The same for the float32 that a kernel takes. A positive one has a finite reciprocal.
  float float32(const char* name, Zero zero = Zero::refused) {
    const double value = number(name);
    const auto rounded = static_cast<float>(value);
    const bool fits = zero == Zero::allowed ? value >= 0. : rounded >= 0x1p-126f;
    if (!fits || std::isinf(rounded)) {
      raise("ValueError", "`%s` must be %s and finite in float32, got %g", name,
            zero == Zero::allowed ? "not negative" : "positive", value);
    }
    return rounded;
  }

  int64_t integer(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index != kTVMFFIInt) raise_type(name, "an int", value);
    return value.v_int64;
  }

  // Accepts `low` to `high`, both included.
  int64_t integer_in(const char* name, int64_t low, int64_t high) {
    const int64_t value = integer(name);
    if (value < low || value > high) {
      raise("ValueError", "`%s` must be from %lld to %s, got %lld", name,
            static_cast<long long>(low), bound_text(high).c_str(), static_cast<long long>(value));
    }
    return value;
  }

  bool flag(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index != kTVMFFIBool) raise_type(name, "a bool", value);
    return value.v_int64 != 0;
  }

  enum class Flag { kFalse, kTrue, kNone };

  Flag optional_flag(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFINone) return Flag::kNone;
    if (value.type_index != kTVMFFIBool) raise_type(name, "a bool or None", value);
    return value.v_int64 ? Flag::kTrue : Flag::kFalse;
  }

  // The `count` elements of a tuple.
  Args group(const char* name, int64_t count) {
    const Args elements = optional_group(name, count);
    if (elements.count_ == 0) raise_type(name, "a tuple", last());
    return elements;
  }

  // None gives a group without elements, which is false.
  Args optional_group(const char* name, int64_t count) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFINone) return {nullptr, 0};
    if (value.type_index != kTVMFFIArray) raise_type(name, "a tuple", value);
    const auto& cell = *reinterpret_cast<const ArrayCell*>(
        reinterpret_cast<const char*>(value.v_obj) + sizeof(TVMFFIObject));
    if (cell.size != count) {
      raise("TypeError", "`%s` must have %lld elements, got %lld", name,
            static_cast<long long>(count), static_cast<long long>(cell.size));
    }
    return {cell.elements, cell.size};
  }

  explicit operator bool() const { return count_ != 0; }

  // Refuses surplus arguments. Call it after the last argument is taken, before any is used.
  void all_taken() const {
    if (used_ < count_) {
      raise("TypeError", "takes %lld arguments, got %lld", static_cast<long long>(used_),
            static_cast<long long>(count_));
    }
  }

 private:
  static Text bound_text(int64_t bound) {
    if (bound == INT32_MAX) return {"2^31 - 1"};
    Text text{};
    std::snprintf(text.chars, sizeof(text.chars), "%lld", static_cast<long long>(bound));
    return text;
  }

  // Follows the header of an array object (part of the stable ABI, as for tensors).
  struct ArrayCell {
    const TVMFFIAny* elements;
    int64_t size;
  };

  static bool is_tensor(const TVMFFIAny& value) {
    return value.type_index == kTVMFFITensor || value.type_index == kTVMFFIDLTensorPtr;
  }
  static const DLTensor* as_tensor(const TVMFFIAny& value) {
    if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(value.v_ptr);
    // A tensor object is its header followed by the DLTensor (part of the stable ABI).
    return reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(value.v_obj) +
                                             sizeof(TVMFFIObject));
  }
  const TVMFFIAny& next(const char* name) {
    if (used_ >= count_) raise("TypeError", "missing argument `%s`", name);
    return values_[used_++];
  }
  const TVMFFIAny& last() const { return values_[used_ - 1]; }

  [[noreturn]] void raise_type(const char* name, const char* expected, const TVMFFIAny& value) {
    const int32_t type = value.type_index;
    const char* got = type == kTVMFFINone                             ? "None"
                      : type == kTVMFFIBool                           ? "a bool"
                      : type == kTVMFFIInt                            ? "an int"
                      : type == kTVMFFIFloat                          ? "a float"
                      : type == kTVMFFISmallStr || type == kTVMFFIStr ? "a str"
                      : type == kTVMFFIDataType                       ? "a dtype"
                      : type == kTVMFFIArray                          ? "a list or tuple"
                      : is_tensor(value)                              ? "a torch.Tensor"
                                                                      : "another object";
    raise("TypeError", "`%s` must be %s, got %s", name, expected, got);
  }

  const TVMFFIAny* values_;
  int64_t count_;
  int64_t used_ = 0;
};

// The stream the caller's framework is on.
inline cudaStream_t current_stream(const Tensor& tensor) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, tensor.dl->device.device_id));
}

// Makes the tensor's device current for the length of a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) {
    check(cudaGetDevice(&previous_));
    changed_ = previous_ != tensor.dl->device.device_id;
    if (changed_) check(cudaSetDevice(tensor.dl->device.device_id));
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  static void check(cudaError_t status) {
    if (status != cudaSuccess) raise("RuntimeError", "CUDA: %s", cudaGetErrorString(status));
  }
  int previous_ = 0;
  bool changed_ = false;
};

// Facts about a device that never change, asked of the driver once. A race writes the same values
// twice.
inline const DeviceInfo& device_info(const Tensor& tensor) {
  constexpr int kMaxDevices = 64;
  static DeviceInfo infos[kMaxDevices];
  const int device = tensor.dl->device.device_id;
  if (device < 0 || device >= kMaxDevices) raise("ValueError", "`%s`: no such device", tensor.name);
  DeviceInfo& info = infos[device];
  if (info.compute_capability == 0) {
    int num_sms = 0, major = 0, minor = 0;
    cudaError_t status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess) {
      status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (status == cudaSuccess) {
      status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    }
    if (status != cudaSuccess) raise("RuntimeError", "CUDA: %s", cudaGetErrorString(status));
    info.num_sms = num_sms;
    info.compute_capability = 10 * major + minor;
  }
  return info;
}

// `enable_pdl`: None takes programmatic dependent launch where the device has it.
inline bool resolve_pdl(Args::Flag enable_pdl, const Tensor& tensor) {
  const DeviceInfo& info = device_info(tensor);
  if (enable_pdl == Args::Flag::kTrue && !info.has_pdl()) {
    raise("ValueError", "`enable_pdl` needs compute capability 9.0 or later, the device has %d.%d",
          info.compute_capability / 10, info.compute_capability % 10);
  }
  return enable_pdl == Args::Flag::kTrue || (enable_pdl == Args::Flag::kNone && info.has_pdl());
}

// Calls an exported function: what it throws becomes a Python exception.
template <typename Function>
int call(const TVMFFIAny* values, int32_t count, TVMFFIAny* result, int32_t result_type,
         const Function& function) {
  Args args(values, count);
  try {
    result->v_int64 = function(args);
    args.all_taken();
  } catch (const Error& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind, error.message);
    return -1;
  }
  result->type_index = result_type;
  return 0;
}

inline void check_launch(cudaError_t status) {
  if (status != cudaSuccess) {
    raise("RuntimeError", "kernel launch failed: %s (%s)", cudaGetErrorName(status),
          cudaGetErrorString(status));
  }
}

}  // namespace flashinfer::ffi

// Defines and exports a function that Python calls as `module.name(...)`. It returns None. A
// function that does not call all_taken() itself is held to it afterwards.
#define FLASHINFER_FFI_EXPORT(name, args)                                                          \
  static void name##_ffi(::flashinfer::ffi::Args& args);                                           \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values,               \
                                                     int32_t count, TVMFFIAny* result) {           \
    return ::flashinfer::ffi::call(values, count, result, kTVMFFINone, [](auto& args) -> int64_t { \
      name##_ffi(args);                                                                            \
      return 0;                                                                                    \
    });                                                                                            \
  }                                                                                                \
  static void name##_ffi(::flashinfer::ffi::Args& args)

// The same for a function that returns an int64_t.
#define FLASHINFER_FFI_EXPORT_INT(name, args)                                            \
  static int64_t name##_ffi(::flashinfer::ffi::Args& args);                              \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values,     \
                                                     int32_t count, TVMFFIAny* result) { \
    return ::flashinfer::ffi::call(values, count, result, kTVMFFIInt, name##_ffi);       \
  }                                                                                      \
  static int64_t name##_ffi(::flashinfer::ffi::Args& args)
