// Checks of tensors. Each throws an error that names the tensor, what it is and what is allowed.
#pragma once

#include <initializer_list>

#include "ffi_tensor.h"

namespace flashinfer::ffi {

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

inline void check_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.ndim() - 1; i >= 0; --i) {
    if (tensor.dim(i) == 0) return;
    if (tensor.dim(i) != 1 && tensor.stride(i) != expected) {
      raise("ValueError", "`%s` must be contiguous, got strides %s for shape %s", tensor.name,
            list_text(tensor.dl->strides, tensor.ndim()).c_str(), tensor.shape_text().c_str());
    }
    expected *= tensor.dim(i);
  }
}

// One dimension of `length` elements, without gaps.
inline void check_vector(const Tensor& tensor, std::initializer_list<DLDataType> allowed,
                         int64_t length) {
  check_dtype(tensor, allowed);
  check_shape(tensor, {length});
  check_contiguous(tensor);
}

inline void check_vector(const Tensor& tensor, DLDataType type, int64_t length) {
  check_vector(tensor, {type}, length);
}

// Elements from one row to the next when all leading dimensions are seen as one, or a ValueError.
inline int64_t row_stride(const Tensor& tensor) {
  int64_t stride = -1, rows = 1;
  for (int i = tensor.ndim() - 2; i >= 0; --i) {
    if (tensor.dim(i) == 1) continue;
    if (stride < 0) stride = tensor.stride(i);
    if (tensor.stride(i) != rows * stride) {
      raise("ValueError",
            "`%s` must have leading dimensions that fold into one (a contiguous tensor, or a "
            "column slice of one), got strides %s",
            tensor.name, list_text(tensor.dl->strides, tensor.ndim()).c_str());
    }
    rows *= tensor.dim(i);
  }
  return stride < 0 ? tensor.dim(-1) : stride;
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

inline void check_aligned(const Tensor& tensor, int bytes) {
  if (!is_aligned(tensor, bytes)) {
    raise("ValueError", "`%s` must begin at a multiple of %d bytes", tensor.name, bytes);
  }
}

// Checks rows that are read or written `alignment` bytes at a time.
inline void check_aligned_rows(const Tensor& tensor, int alignment) {
  check_last_dim_contiguous(tensor);
  bool aligned = is_aligned(tensor, alignment);
  for (int i = 0; i + 1 < tensor.ndim(); ++i) {
    const int64_t bytes = tensor.stride(i) * tensor.itemsize();
    aligned = aligned && (tensor.dim(i) <= 1 || bytes % alignment == 0);
  }
  if (!aligned && tensor.numel() != 0) {
    raise("ValueError",
          "`%s`: rows must begin at multiples of %d bytes, got strides %s of %lld bytes",
          tensor.name, alignment, list_text(tensor.dl->strides, tensor.ndim()).c_str(),
          static_cast<long long>(tensor.itemsize()));
  }
}

// The same for 16 bytes.
inline void check_vector_rows(const Tensor& tensor) { check_aligned_rows(tensor, 16); }

}  // namespace flashinfer::ffi
