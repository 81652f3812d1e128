// Pinned memory from which plans are copied to the GPU.
#pragma once

#include "ffi.h"

namespace flashinfer {

// A few buffers used in turn. Each has an event that tells when its last copy has been read, so
// planning again waits for the GPU only if all of them are still in flight.
class StagingRing {
 public:
  StagingRing() = default;
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;
  // At exit the runtime may be gone before the last plan, so errors are ignored here. Python may
  // collect a plan while the thread captures a graph, to which this memory does not belong: calls
  // that wait or free would end the capture, were the thread not told to let them pass.
  ~StagingRing() {
    if (buffers_[0].read == nullptr) return;  // nothing was copied
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode);
    for (Buffer& buffer : buffers_) release(buffer);
    if (status == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode);
  }

  // Lets `write` fill `bytes` bytes, and copies them to the tensor on the current stream.
  template <typename Write>
  void copy(const ffi::Tensor& target, int64_t bytes, const Write& write) {
    if (bytes == 0) return;
    const ffi::DeviceGuard guard(target);
    const cudaStream_t stream = ffi::current_stream(target);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status));
    if (status != cudaStreamCaptureStatusNone) {
      ffi::raise("ValueError",
                 "plan() must be called before the capture of a CUDA graph, not within it");
    }
    Buffer& buffer = buffers_[next_];
    next_ = (next_ + 1) % kBuffers;
    prepare(buffer, target.dl->device.device_id, bytes);
    write(buffer.data);
    check(cudaMemcpyAsync(target.data(), buffer.data, bytes, cudaMemcpyHostToDevice, stream));
    check(cudaEventRecord(buffer.read, stream));
    buffer.in_flight = true;
  }

 private:
  static constexpr int kBuffers = 3;
  static constexpr int64_t kLeastBytes = 1 << 16;

  struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
    int device = -1;
    cudaEvent_t read = nullptr;
    bool in_flight = false;
  };

  static void check(cudaError_t status) {
    if (status != cudaSuccess) ffi::raise("RuntimeError", "CUDA: %s", cudaGetErrorString(status));
  }

  static void release(Buffer& buffer) {
    if (buffer.in_flight) cudaEventSynchronize(buffer.read);
    if (buffer.read) cudaEventDestroy(buffer.read);
    if (buffer.data) cudaFreeHost(buffer.data);
    buffer = Buffer{};
  }

  // Waits for the buffer's last copy; grows it by doubling. An event belongs to a device.
  static void prepare(Buffer& buffer, int device, int64_t bytes) {
    if (buffer.in_flight) check(cudaEventSynchronize(buffer.read));
    buffer.in_flight = false;
    if (buffer.device == device && buffer.bytes >= bytes) return;
    int64_t size = kLeastBytes;
    while (size < bytes) size *= 2;
    release(buffer);
    check(cudaEventCreateWithFlags(&buffer.read, cudaEventDisableTiming));
    check(cudaHostAlloc(&buffer.data, size, cudaHostAllocPortable));
    buffer.bytes = size;
    buffer.device = device;
  }

  Buffer buffers_[kBuffers];
  int next_ = 0;
};

}  // namespace flashinfer
