// In place of the product's header: offsets into the shared memory of the CTA.
#pragma once

#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer::ptx {

namespace emulated {

template <typename T>
inline char* shared_at(uint32_t address) {
  if (address % sizeof(T) != 0) emulation::fail("a misaligned access of shared memory");
  if (address + sizeof(T) > emulation::shared_bytes) emulation::fail("an access past it");
  return dynamic_shared + address;
}

template <typename T>
inline T load_shared(uint32_t address) {
  T value;
  std::memcpy(&value, shared_at<T>(address), sizeof(T));
  return value;
}

template <typename T>
inline void store_shared(uint32_t address, const T& value) {
  std::memcpy(shared_at<T>(address), &value, sizeof(T));
}

}  // namespace emulated

inline uint4 load_shared_16(uint32_t shared) { return emulated::load_shared<uint4>(shared); }
inline uint2 load_shared_8(uint32_t shared) { return emulated::load_shared<uint2>(shared); }
inline uint32_t load_shared_1(uint32_t shared) { return emulated::load_shared<uint8_t>(shared); }
inline uint32_t load_shared_2(uint32_t shared) { return emulated::load_shared<uint16_t>(shared); }
inline uint32_t load_shared_4(uint32_t shared) { return emulated::load_shared<uint32_t>(shared); }

inline void store_shared_16(uint32_t shared, const uint4& value) {
  std::memcpy(emulated::shared_at<uint4>(shared), &value, sizeof(value));
}

inline void store_shared_4(uint32_t shared, uint32_t value) {
  std::memcpy(emulated::shared_at<uint32_t>(shared), &value, sizeof(value));
}

}  // namespace flashinfer::ptx
