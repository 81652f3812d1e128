// Tensors as bindings see them, and the error that a check throws.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>

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
inline constexpr DLDataType int16{kDLInt, 16, 1};
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

}  // namespace flashinfer::ffi
