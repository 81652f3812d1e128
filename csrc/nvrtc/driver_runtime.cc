// The functions of the CUDA runtime that launchers and bindings call, on the driver API.
//
// A host part is a module without its device code: launcher and binding, compiled when the wheel is
// made. It links this file instead of the CUDA runtime. NVRTC compiles the kernels on the user's
// machine, and their cubins are appended to a copy of the host part:
//
//   host part (ELF) | container | offset of the container, 8 bytes | "FICUBIN1"
//
// The container has the layout of nvcc's, so one reader (flashinfer/jit/binary.py) serves both:
//   header   magic 0xBA55ED50, u16 version, u16 size of the header, u64 size of all entries
//   entry    u16 kind (2: cubin), u16 version, u32 size of the header, u64 size of the cubin,
//            at 28: u32 compute capability, at 40: u64 flags; then the cubin
//
// nvcc's start-up code registers each kernel under its mangled name. A kernel is looked up by that
// name in the cubin when it is first used. The driver library is opened at run time, so a host part
// loads on a machine without one.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#define FLASHINFER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

cudaError_t as_runtime(CUresult status) { return static_cast<cudaError_t>(status); }

// The driver's functions. `opened` says whether all of them were found and the driver started.
struct Driver {
  // clang-format off: it is not stable on such lists
#define FLASHINFER_DRIVER_FUNCTIONS(F)                          \
  F(cuInit, 2000)                                               \
  F(cuGetErrorString, 6000)                                     \
  F(cuGetErrorName, 6000)                                       \
  F(cuDeviceGet, 2000)                                          \
  F(cuDeviceGetAttribute, 2000)                                 \
  F(cuDevicePrimaryCtxRetain, 7000)                             \
  F(cuCtxSetCurrent, 4000)                                      \
  F(cuCtxGetCurrent, 4000)                                      \
  F(cuCtxGetDevice, 2000)                                       \
  F(cuLibraryLoadData, 12000)                                   \
  F(cuLibraryGetKernel, 12000)                                  \
  F(cuKernelGetAttribute, 12000)                                \
  F(cuKernelSetAttribute, 12000)                                \
  F(cuLaunchKernelEx, 11060)                                    \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000) \
  F(cuOccupancyMaxActiveClusters, 11070)                        \
  F(cuStreamIsCapturing, 10000)                                 \
  F(cuThreadExchangeStreamCaptureMode, 10010)                   \
  F(cuMemcpyAsync, 4000)                                        \
  F(cuMemHostAlloc, 2020)                                       \
  F(cuMemFreeHost, 2000)                                        \
  F(cuEventCreate, 2000)                                        \
  F(cuEventRecord, 2000)                                        \
  F(cuEventSynchronize, 2000)                                   \
  F(cuEventDestroy, 4000)
// clang-format on
#define FLASHINFER_DECLARE(name, version) decltype(&::name) name = nullptr;
  FLASHINFER_DRIVER_FUNCTIONS(FLASHINFER_DECLARE)
#undef FLASHINFER_DECLARE
  using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t,
                                      CUdriverProcAddressQueryResult*);
  GetProcAddress find = nullptr;
  cudaError_t opened = cudaErrorInsufficientDriver;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    find = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    if (find == nullptr) return;  // older than CUDA 12
    bool complete = true;
    const auto take = [&](const char* symbol, int version, auto& function) {
      void* found = nullptr;
      CUdriverProcAddressQueryResult result;
      const CUresult status = find(symbol, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &result);
      complete = complete && status == CUDA_SUCCESS && found != nullptr;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
#define FLASHINFER_TAKE(name, version) take(#name, version, name);
    FLASHINFER_DRIVER_FUNCTIONS(FLASHINFER_TAKE)
#undef FLASHINFER_TAKE
    if (complete) opened = as_runtime(cuInit(0));
  }
};

const Driver& driver() {
  static const Driver opened;
  return opened;
}

constexpr int kMaxDevices = 64;

// Makes the primary context of a device current, as the runtime does.
cudaError_t make_current(int device) {
  static std::atomic<CUcontext> contexts[kMaxDevices] = {};
  if (device < 0 || device >= kMaxDevices) return cudaErrorInvalidDevice;
  CUcontext context = contexts[device].load(std::memory_order_acquire);
  if (context == nullptr) {
    CUdevice handle;
    CUresult status = driver().cuDeviceGet(&handle, device);
    if (status == CUDA_SUCCESS) status = driver().cuDevicePrimaryCtxRetain(&context, handle);
    if (status != CUDA_SUCCESS) return as_runtime(status);
    contexts[device].store(context, std::memory_order_release);
  }
  return as_runtime(driver().cuCtxSetCurrent(context));
}

cudaError_t current_device(int* device) {
  if (driver().opened != cudaSuccess) return driver().opened;
  CUdevice handle = 0;
  const CUresult status = driver().cuCtxGetDevice(&handle);
  *device = status == CUDA_SUCCESS ? handle : 0;
  // A thread without a context is on device 0, and its first call makes the context current.
  return status == CUDA_ERROR_INVALID_CONTEXT ? make_current(0) : as_runtime(status);
}

// A cubin and its kernels, in the order of their registration.
struct Image {
  uint32_t compute_capability;
  const unsigned char* cubin;
  CUlibrary library = nullptr;
  std::unique_ptr<std::atomic<CUkernel>[]> kernels;
};

// The kernels of this module.
class Module {
 public:
  void add_kernel(const void* stub, const char* name) {
    stubs_.push_back(stub);
    names_.push_back(name);
  }

  const std::vector<const char*>& names() const { return names_; }

  // The kernel that nvcc's stub stands for, on the current device.
  cudaError_t find(const void* stub, CUkernel* kernel) {
    int device = 0;
    Image* image = nullptr;
    cudaError_t status = current_device(&device);
    if (status == cudaSuccess) status = image_for(device, &image);
    if (status != cudaSuccess) return status;
    for (size_t i = 0; i < stubs_.size(); ++i) {
      if (stubs_[i] != stub) continue;
      *kernel = image->kernels[i].load(std::memory_order_acquire);
      return *kernel ? cudaSuccess : look_up(*image, i, kernel);
    }
    return cudaErrorInvalidDeviceFunction;
  }

  // Reads the cubins after the host part. It runs when the library is loaded: later, the copy that
  // is loaded (flashinfer/jit/sealed.py) has no name any more.
  void read_images() {
    Dl_info info;
    if (dladdr(reinterpret_cast<const void*>(&driver), &info) == 0) return;
    std::FILE* file = std::fopen(info.dli_fname, "rb");
    if (file == nullptr) return;
    read_container(file);
    std::fclose(file);
  }

 private:
  void read_container(std::FILE* file) {
    unsigned char trailer[16];
    uint64_t offset;
    if (std::fseek(file, -16, SEEK_END) != 0 || std::fread(trailer, 1, 16, file) != 16) return;
    if (std::memcmp(trailer + 8, "FICUBIN1", 8) != 0) return;
    const auto end = static_cast<uint64_t>(std::ftell(file)) - 16;
    std::memcpy(&offset, trailer, 8);
    if (offset > end || std::fseek(file, static_cast<long>(offset), SEEK_SET) != 0) return;
    bytes_.resize(end - offset);
    if (std::fread(bytes_.data(), 1, bytes_.size(), file) != bytes_.size()) bytes_.clear();
    constexpr size_t kHeader = 16, kEntryHeader = 64;
    for (size_t at = kHeader; at + kEntryHeader <= bytes_.size();) {
      uint64_t size;
      Image image;
      std::memcpy(&size, &bytes_[at + 8], 8);
      std::memcpy(&image.compute_capability, &bytes_[at + 28], 4);
      if (size > bytes_.size() - at - kEntryHeader) return;  // truncated
      image.cubin = &bytes_[at + kEntryHeader];
      images_.push_back(std::move(image));
      at += kEntryHeader + size;
    }
  }

  // The cubin for a device: of its own compute capability, else the highest lower one of its major
  // version.
  cudaError_t image_for(int device, Image** image) {
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    *image = chosen_[device].load(std::memory_order_acquire);
    if (*image != nullptr) return cudaSuccess;
    const std::lock_guard<std::mutex> lock(mutex_);
    int major = 0, minor = 0;
    CUresult status =
        driver().cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (status == CUDA_SUCCESS) {
      status = driver().cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                             device);
    }
    if (status != CUDA_SUCCESS) return as_runtime(status);
    const auto wanted = static_cast<uint32_t>(10 * major + minor);
    Image* best = nullptr;
    for (Image& candidate : images_) {
      const uint32_t cc = candidate.compute_capability;
      if (cc / 10 != wanted / 10 || cc > wanted) continue;
      if (best == nullptr || cc > best->compute_capability) best = &candidate;
    }
    if (best == nullptr) return cudaErrorNoKernelImageForDevice;
    if (best->library == nullptr) {
      best->kernels.reset(new std::atomic<CUkernel>[stubs_.size()]());
      status = driver().cuLibraryLoadData(&best->library, best->cubin, nullptr, nullptr, 0, nullptr,
                                          nullptr, 0);
      if (status != CUDA_SUCCESS) return as_runtime(status);
    }
    chosen_[device].store(best, std::memory_order_release);
    *image = best;
    return cudaSuccess;
  }

  cudaError_t look_up(Image& image, size_t index, CUkernel* kernel) {
    const CUresult status = driver().cuLibraryGetKernel(kernel, image.library, names_[index]);
    if (status != CUDA_SUCCESS) return as_runtime(status);
    image.kernels[index].store(*kernel, std::memory_order_release);  // a race stores it twice
    return cudaSuccess;
  }

  std::vector<const void*> stubs_;
  std::vector<const char*> names_;
  std::vector<unsigned char> bytes_;
  std::vector<Image> images_;
  std::atomic<Image*> chosen_[kMaxDevices] = {};
  std::mutex mutex_;
};

// It outlives the process's last call: threads may still launch while others leave.
Module& module() {
  static auto* const only = new Module;
  return *only;
}

CUlaunchConfig as_driver(const cudaLaunchConfig_t& config) {
  static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute));
  CUlaunchConfig result = {};
  result.gridDimX = config.gridDim.x;
  result.gridDimY = config.gridDim.y;
  result.gridDimZ = config.gridDim.z;
  result.blockDimX = config.blockDim.x;
  result.blockDimY = config.blockDim.y;
  result.blockDimZ = config.blockDim.z;
  result.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
  result.hStream = config.stream;
  result.attrs = reinterpret_cast<CUlaunchAttribute*>(config.attrs);
  result.numAttrs = config.numAttrs;
  return result;
}

}  // namespace

// The mangled names of the kernels: copies at most `capacity` pointers and returns the number.
FLASHINFER_EXPORT int flashinfer_kernel_names(const char** names, int capacity) {
  const auto& all = module().names();
  const int count = static_cast<int>(all.size());
  for (int i = 0; i < count && i < capacity; ++i) names[i] = all[i];
  return count;
}

extern "C" {

// The start-up code of nvcc calls these.
void** __cudaRegisterFatBinary(void*) {
  static bool is_read = false;  // once per module, not once per source; loading is serial
  if (!is_read) module().read_images();
  is_read = true;
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  module().add_kernel(stub, name);
}

// A stub calls these. Launchers pass the addresses of stubs to cudaLaunchKernelExC and never call
// one.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** args) {
  CUkernel kernel;
  const cudaError_t status = module().find(stub, &kernel);
  if (status != cudaSuccess) return status;
  const CUlaunchConfig launch = as_driver(*config);
  return as_runtime(
      driver().cuLaunchKernelEx(&launch, reinterpret_cast<CUfunction>(kernel), args, nullptr));
}

cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  CUkernel kernel;
  int device = 0;
  cudaError_t status = module().find(stub, &kernel);
  if (status == cudaSuccess) status = current_device(&device);
  if (status != cudaSuccess) return status;
  CUfunction_attribute wanted;
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
      wanted = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
      break;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
      wanted = CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
      break;
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
      wanted = CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return as_runtime(driver().cuKernelSetAttribute(wanted, value, kernel, device));
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  CUkernel kernel;
  int device = 0;
  cudaError_t status = module().find(stub, &kernel);
  if (status == cudaSuccess) status = current_device(&device);
  *attributes = {};
  const auto read = [&](CUfunction_attribute name, auto& field) {
    int value = 0;
    if (status != cudaSuccess) return;
    status = as_runtime(driver().cuKernelGetAttribute(&value, name, kernel, device));
    field = static_cast<std::remove_reference_t<decltype(field)>>(value);
  };
  read(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, attributes->sharedSizeBytes);
  read(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, attributes->constSizeBytes);
  read(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, attributes->localSizeBytes);
  read(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, attributes->maxThreadsPerBlock);
  read(CU_FUNC_ATTRIBUTE_NUM_REGS, attributes->numRegs);
  read(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, attributes->maxDynamicSharedSizeBytes);
  return status;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* stub,
                                                                   int threads, size_t smem_bytes,
                                                                   unsigned flags) {
  CUkernel kernel;
  const cudaError_t status = module().find(stub, &kernel);
  if (status != cudaSuccess) return status;
  return as_runtime(driver().cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
      count, reinterpret_cast<CUfunction>(kernel), threads, smem_bytes, flags));
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* stub, int threads,
                                                          size_t smem_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, stub, threads, smem_bytes,
                                                                cudaOccupancyDefault);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void* stub,
                                           const cudaLaunchConfig_t* config) {
  CUkernel kernel;
  const cudaError_t status = module().find(stub, &kernel);
  if (status != cudaSuccess) return status;
  const CUlaunchConfig launch = as_driver(*config);
  return as_runtime(
      driver().cuOccupancyMaxActiveClusters(count, reinterpret_cast<CUfunction>(kernel), &launch));
}

cudaError_t cudaGetDevice(int* device) { return current_device(device); }

cudaError_t cudaSetDevice(int device) {
  return driver().opened == cudaSuccess ? make_current(device) : driver().opened;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (driver().opened != cudaSuccess) return driver().opened;
  CUdevice handle;
  const CUresult status = driver().cuDeviceGet(&handle, device);
  if (status != CUDA_SUCCESS) return as_runtime(status);
  return as_runtime(
      driver().cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), handle));
}

// Errors are returned where they arise; none is kept.
cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  const char* text = nullptr;
  if (driver().opened != cudaSuccess) return "no CUDA driver of version 12 or later was found";
  driver().cuGetErrorString(static_cast<CUresult>(error), &text);
  return text ? text : "unknown error";
}

const char* cudaGetErrorName(cudaError_t error) {
  const char* text = nullptr;
  if (driver().opened != cudaSuccess) return "cudaErrorInsufficientDriver";
  driver().cuGetErrorName(static_cast<CUresult>(error), &text);
  return text ? text : "cudaErrorUnknown";
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result) {
  if (driver().opened != cudaSuccess) return driver().opened;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const CUresult status = driver().find(symbol, function, static_cast<int>(version), flags, &found);
  if (result) *result = static_cast<cudaDriverEntryPointQueryResult>(found);
  return as_runtime(status);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return as_runtime(
      driver().cuStreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus*>(status)));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (driver().opened != cudaSuccess) return driver().opened;
  return as_runtime(
      driver().cuThreadExchangeStreamCaptureMode(reinterpret_cast<CUstreamCaptureMode*>(mode)));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  return as_runtime(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to),
                                           reinterpret_cast<CUdeviceptr>(from), size, stream));
}

cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned flags) {
  return as_runtime(driver().cuMemHostAlloc(memory, size, flags));
}
cudaError_t cudaFreeHost(void* memory) { return as_runtime(driver().cuMemFreeHost(memory)); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return as_runtime(driver().cuEventCreate(event, flags));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return as_runtime(driver().cuEventRecord(event, stream));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return as_runtime(driver().cuEventSynchronize(event));
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return as_runtime(driver().cuEventDestroy(event));
}

}  // extern "C"
