// What a binding needs of TVM-FFI, on its C ABI: arguments taken by name, checks whose message
// names the argument, what it was and what is allowed, and the export macro.
//
// The C ABI rather than the C++ API of tvm/ffi/tvm_ffi.h, because that header costs the host
// compiler 2.3 s a unit and this one 0.4 s, and because its own conversion errors know an
// argument's position, not its name. Users' ops may use either; tvm_ffi_utils.h is the C++ one.
//
//   FLASHINFER_FFI_EXPORT(rmsnorm, args) {
//     const ffi::Tensor out = args.tensor("out"), input = args.tensor("input");
//     const double eps = args.number("eps");
//     ffi::check_dtype(input, ffi::dtype::bfloat16);
//     ...
//   }
//
// Checks throw; FLASHINFER_FFI_EXPORT turns that into the Python exception. Check the device last:
// everything before it can then be tested on a machine without a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <flashinfer/common/device_info.h>
#include <initializer_list>
#include <numeric>

namespace flashinfer::ffi {

struct Error {
  const char* kind;  // Python exception class
  char message[512];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void raise(const char* kind,
                                                                     const char* format, ...) {
  Error error{kind, {}};
  va_list values;
  va_start(values, format);
  std::vsnprintf(error.message, sizeof(error.message), format, values);
  va_end(values);
  throw error;
}

namespace dtype {
inline constexpr DLDataType float64{kDLFloat, 64, 1};
inline constexpr DLDataType float32{kDLFloat, 32, 1};
inline constexpr DLDataType float16{kDLFloat, 16, 1};
inline constexpr DLDataType bfloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType float8_e4m3fn{kDLFloat8_e4m3fn, 8, 1};
inline constexpr DLDataType float8_e5m2{kDLFloat8_e5m2, 8, 1};
inline constexpr DLDataType int8{kDLInt, 8, 1};
inline constexpr DLDataType uint8{kDLUInt, 8, 1};
inline constexpr DLDataType int32{kDLInt, 32, 1};
inline constexpr DLDataType int64{kDLInt, 64, 1};
inline constexpr DLDataType boolean{kDLBool, 8, 1};
}  // namespace dtype

inline bool operator==(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}
inline bool operator!=(DLDataType a, DLDataType b) { return !(a == b); }

// A short piece of text by value: dtype names and shapes in messages.
struct Text {
  char chars[160];
  const char* c_str() const { return chars; }
};

inline Text dtype_name(DLDataType type) {
  Text text{};
  const auto print = [&](const char* format, int number) {
    std::snprintf(text.chars, sizeof(text.chars), format, number);
  };
  switch (type.code) {
    case kDLInt:
      print("int%d", type.bits);
      break;
    case kDLUInt:
      print("uint%d", type.bits);
      break;
    case kDLFloat:
      print("float%d", type.bits);
      break;
    case kDLBfloat:
      print("bfloat%d", type.bits);
      break;
    case kDLComplex:
      print("complex%d", type.bits);
      break;
    case kDLBool:
      print("bool", 0);
      break;
    case kDLFloat8_e4m3fn:
      print("float8_e4m3fn", 0);
      break;
    case kDLFloat8_e5m2:
      print("float8_e5m2", 0);
      break;
    default:
      print("DLPack type %d", type.code);
  }
  return text;
}

inline Text list_text(const int64_t* values, int count) {
  Text text{};
  int used = std::snprintf(text.chars, sizeof(text.chars), "[");
  for (int i = 0; i < count && used < 120; ++i) {
    used += std::snprintf(text.chars + used, sizeof(text.chars) - used, i ? ", %lld" : "%lld",
                          static_cast<long long>(values[i]));
  }
  std::snprintf(text.chars + used, sizeof(text.chars) - used, "]");
  return text;
}

// A borrowed tensor and the name it goes by in messages.
struct Tensor {
  const DLTensor* dl = nullptr;
  const char* name = "";

  explicit operator bool() const { return dl != nullptr; }
  int ndim() const { return dl->ndim; }
  int64_t dim(int i) const { return dl->shape[i < 0 ? i + dl->ndim : i]; }
  int64_t stride(int i) const { return dl->strides[i < 0 ? i + dl->ndim : i]; }
  DLDataType dtype() const { return dl->dtype; }
  int64_t itemsize() const { return (dl->dtype.bits * dl->dtype.lanes + 7) / 8; }
  void* data() const { return static_cast<char*>(dl->data) + dl->byte_offset; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < dl->ndim; ++i) count *= dl->shape[i];
    return count;
  }
  // Elements from the first to the last one, both counted; strides are not negative in any
  // framework we read from.
  int64_t extent() const {
    int64_t last = 0;
    for (int i = 0; i < dl->ndim; ++i) {
      if (dl->shape[i] == 0) return 0;
      last += (dl->shape[i] - 1) * dl->strides[i];
    }
    return last + 1;
  }
  Text shape_text() const { return list_text(dl->shape, dl->ndim); }
};

// The arguments of one call, taken in order.
class Args {
 public:
  Args(const TVMFFIAny* values, int32_t count) : values_(values), count_(count) {}

  Tensor tensor(const char* name) {
    const Tensor result = optional_tensor(name);
    if (!result) raise_type(name, "a torch.Tensor", last());
    return result;
  }

  // None gives a Tensor that is false.
  Tensor optional_tensor(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFINone) return {nullptr, name};
    if (!is_tensor(value)) raise_type(name, "a torch.Tensor", value);
    return {as_tensor(value), name};
  }

  bool next_is_tensor() const { return used_ < count_ && is_tensor(values_[used_]); }

  bool next_is_number() const {
    if (used_ >= count_) return false;
    const int32_t type = values_[used_].type_index;
    return type == kTVMFFIFloat || type == kTVMFFIInt;
  }

  double number(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFIFloat) return value.v_float64;
    if (value.type_index == kTVMFFIInt) return static_cast<double>(value.v_int64);
    raise_type(name, "a number", value);
  }

  int64_t integer(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index != kTVMFFIInt) raise_type(name, "an int", value);
    return value.v_int64;
  }

  enum class Flag { kFalse, kTrue, kNone };

  Flag optional_flag(const char* name) {
    const TVMFFIAny& value = next(name);
    if (value.type_index == kTVMFFINone) return Flag::kNone;
    if (value.type_index != kTVMFFIBool) raise_type(name, "a bool or None", value);
    return value.v_int64 ? Flag::kTrue : Flag::kFalse;
  }

 private:
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
  int32_t count_;
  int32_t used_ = 0;
};

// `value` as the float32 that a kernel takes, finite there too: positive, and not so small that
// its reciprocal is infinite, or at least zero.
inline float check_float(const char* name, double value, bool may_be_zero) {
  const auto rounded = static_cast<float>(value);
  if (!(may_be_zero ? value >= 0. : rounded >= 0x1p-126f) || std::isinf(rounded)) {
    raise("ValueError", "`%s` must be %s and finite in float32, got %g", name,
          may_be_zero ? "not negative" : "positive", value);
  }
  return rounded;
}

inline void check_dtype(const Tensor& tensor, std::initializer_list<DLDataType> allowed) {
  for (const DLDataType& type : allowed) {
    if (tensor.dtype() == type) return;
  }
  char list[128];
  int used = 0;
  for (const DLDataType& type : allowed) {
    used += std::snprintf(list + used, sizeof(list) - used, used ? " or %.32s" : "%.32s",
                          dtype_name(type).c_str());
  }
  raise("ValueError", "`%s` must have dtype %s, got %s", tensor.name, list,
        dtype_name(tensor.dtype()).c_str());
}

inline void check_dtype(const Tensor& tensor, DLDataType type) { check_dtype(tensor, {type}); }

inline void check_ndim(const Tensor& tensor, int low, int high) {
  if (tensor.ndim() >= low && tensor.ndim() <= high) return;
  if (low == high) {
    raise("ValueError", "`%s` must have %d dimension%s, got shape %s", tensor.name, low,
          low == 1 ? "" : "s", tensor.shape_text().c_str());
  }
  raise("ValueError", "`%s` must have %d to %d dimensions, got shape %s", tensor.name, low, high,
        tensor.shape_text().c_str());
}

inline void check_same_shape(const Tensor& tensor, const Tensor& like) {
  bool same = tensor.ndim() == like.ndim();
  for (int i = 0; same && i < like.ndim(); ++i) same = tensor.dim(i) == like.dim(i);
  if (!same) {
    raise("ValueError", "`%s` must have the shape of `%s`, %s, got %s", tensor.name, like.name,
          like.shape_text().c_str(), tensor.shape_text().c_str());
  }
}

inline void check_shape(const Tensor& tensor, const int64_t* shape, int ndim) {
  bool same = tensor.ndim() == ndim;
  for (int i = 0; same && i < ndim; ++i) same = tensor.dim(i) == shape[i];
  if (!same) {
    raise("ValueError", "`%s` must have shape %s, got %s", tensor.name,
          list_text(shape, ndim).c_str(), tensor.shape_text().c_str());
  }
}

inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  check_shape(tensor, shape.begin(), static_cast<int>(shape.size()));
}

inline void check_last_dim_contiguous(const Tensor& tensor) {
  if (tensor.numel() != 0 && tensor.dim(-1) > 1 && tensor.stride(-1) != 1) {
    raise("ValueError", "`%s` must be contiguous in its last dimension, got strides %s",
          tensor.name, list_text(tensor.dl->strides, tensor.ndim()).c_str());
  }
}

// A written tensor must not have two indices for one element: each dimension steps over all that
// those of smaller strides span. Expanded tensors fail this, and so do rows that begin within one
// another.
inline void check_no_broadcast(const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  for (int i = 0; i < tensor.ndim(); ++i) {
    if (tensor.dim(i) == 1) continue;
    int64_t span = 1;
    for (int j = 0; j < tensor.ndim(); ++j) {
      const bool inner =
          tensor.stride(j) < tensor.stride(i) || (tensor.stride(j) == tensor.stride(i) && j > i);
      if (inner) span += (tensor.dim(j) - 1) * tensor.stride(j);
    }
    if (tensor.stride(i) < span) {
      raise("ValueError", "`%s` is written and must not be an expanded tensor, got strides %s",
            tensor.name, list_text(tensor.dl->strides, tensor.ndim()).c_str());
    }
  }
}

inline bool overlaps(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data()); };
  const auto end = [&](const Tensor& t) { return begin(t) + t.extent() * t.itemsize(); };
  return begin(a) < end(b) && begin(b) < end(a);
}

inline bool same_view(const Tensor& a, const Tensor& b) {
  bool same = a.data() == b.data() && a.ndim() == b.ndim() && a.dtype() == b.dtype();
  for (int i = 0; same && i < a.ndim(); ++i) {
    same = a.dim(i) == b.dim(i) && (a.dim(i) == 1 || a.stride(i) == b.stride(i));
  }
  return same;
}

// Two views whose address ranges meet may still have no element in common (two column slices of one
// wider tensor). If all elements of a view lie within `extent` of a multiple of some pitch, two
// such bands decide it; any stride may be the pitch.
inline bool share_elements(const Tensor& a, const Tensor& b) {
  if (!overlaps(a, b)) return false;
  if (a.itemsize() != b.itemsize()) return true;
  const auto band = [](const Tensor& tensor, int64_t pitch) {
    int64_t extent = 1;
    for (int i = 0; i < tensor.ndim(); ++i) {
      if (tensor.dim(i) > 1 && tensor.stride(i) % pitch != 0) {
        extent += (tensor.dim(i) - 1) * tensor.stride(i);
      }
    }
    return extent;
  };
  const int64_t distance =
      (reinterpret_cast<intptr_t>(b.data()) - reinterpret_cast<intptr_t>(a.data())) / a.itemsize();
  for (const Tensor* tensor : {&a, &b}) {
    for (int i = 0; i < tensor->ndim(); ++i) {
      const int64_t pitch = tensor->stride(i);
      if (tensor->dim(i) <= 1 || pitch <= 0) continue;
      const int64_t phase = ((distance % pitch) + pitch) % pitch;
      if (phase >= band(a, pitch) && phase + band(b, pitch) <= pitch) return false;
    }
  }
  return true;
}

inline void check_disjoint(const Tensor& written, const Tensor& other) {
  if (written.numel() != 0 && other.numel() != 0 && share_elements(written, other)) {
    raise("ValueError", "`%s` must not share memory with `%s`", written.name, other.name);
  }
}

// For kernels that may work in place: the same view is fine, any other overlap is not.
inline void check_same_view_or_disjoint(const Tensor& written, const Tensor& other) {
  if (!same_view(written, other)) check_disjoint(written, other);
}

inline void check_cuda(const Tensor& tensor) {
  if (tensor.dl->device.device_type != kDLCUDA && tensor.dl->device.device_type != kDLCUDAManaged) {
    raise("ValueError", "`%s` must be a CUDA tensor, got one on %s", tensor.name,
          tensor.dl->device.device_type == kDLCPU ? "the CPU" : "another kind of device");
  }
}

inline void check_same_device(const Tensor& tensor, const Tensor& like) {
  check_cuda(tensor);
  if (tensor.dl->device.device_id != like.dl->device.device_id) {
    raise("ValueError", "`%s` is on cuda:%d and `%s` on cuda:%d: they must be on one device",
          tensor.name, tensor.dl->device.device_id, like.name, like.dl->device.device_id);
  }
}

inline bool is_aligned(const Tensor& tensor, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data()) % bytes == 0;
}

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

inline void check_launch(cudaError_t status) {
  if (status != cudaSuccess) {
    raise("RuntimeError", "kernel launch failed: %s (%s)", cudaGetErrorName(status),
          cudaGetErrorString(status));
  }
}

}  // namespace flashinfer::ffi

// Defines and exports a function that Python calls as `module.name(...)`. It returns None.
#define FLASHINFER_FFI_EXPORT(name, args)                                                \
  static void name##_ffi(::flashinfer::ffi::Args& args);                                 \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values,     \
                                                     int32_t count, TVMFFIAny* result) { \
    ::flashinfer::ffi::Args arguments(values, count);                                    \
    try {                                                                                \
      name##_ffi(arguments);                                                             \
    } catch (const ::flashinfer::ffi::Error& error) {                                    \
      TVMFFIErrorSetRaisedFromCStr(error.kind, error.message);                           \
      return -1;                                                                         \
    }                                                                                    \
    result->type_index = kTVMFFINone;                                                    \
    result->v_int64 = 0;                                                                 \
    return 0;                                                                            \
  }                                                                                      \
  static void name##_ffi(::flashinfer::ffi::Args& args)
