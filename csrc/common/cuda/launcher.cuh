// Launcher starts the kernels of an op and allocates their workspace; the launch code of every op uses it.
// Launch code that is a template of the launcher's type also runs on a CPU, in tests: see
// tests/native/block_on_cpu.h, which has a class with the same members.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/static_shared.cuh"

namespace drot {

// A grid has less than 2^31 blocks; a block takes at least 16 columns, or 8 rows, of y.
inline void check_fits_grid(const at::Tensor& y) {
  TORCH_CHECK_VALUE(y.size(0) / 8 < INT32_MAX && y.size(1) / 16 < INT32_MAX,
                    "y must have less than 2^34 - 8 rows and 2^35 - 16 columns, got ", y.sizes());
}

// t itself, or a copy that is contiguous and aligned to 16 bytes: a view may start anywhere.
inline at::Tensor contiguous_aligned(const at::Tensor& t) {
  const at::Tensor contiguous = t.contiguous();
  return is_aligned(contiguous.const_data_ptr()) ? contiguous : contiguous.clone();
}

// Launches on the current device and stream. `tensor` is any tensor on that device.
class Launcher {
 public:
  explicit Launcher(const at::Tensor& tensor)
      : byte_options_(tensor.options().dtype(at::kByte)),
        properties_(*at::cuda::getCurrentDeviceProperties()),
        stream_(at::cuda::getCurrentCUDAStream()) {}

  int multiprocessors() const { return properties_.multiProcessorCount; }

  // The most bytes of dynamic shared memory that a block may use.
  int64_t shared_memory() const {
    return static_cast<int64_t>(properties_.sharedMemPerBlockOptin) - kStaticShared;
  }

  // Workspace of `count` values, not initialised. The launcher owns it; kernels launched while the launcher
  // exists may use it.
  template <class T>
  T* allocate(int64_t count) {
    workspaces_.push_back(at::empty({count * static_cast<int64_t>(sizeof(T))}, byte_options_));
    return reinterpret_cast<T*>(workspaces_.back().mutable_data_ptr());
  }

  // shared_bytes: dynamic shared memory of a block.
  template <class... P>
  void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes,
              std::type_identity_t<P>... args) {
    if (shared_bytes > 0) {
      // Without the attribute the limit is 48 KB, static arrays included. It is set to the same number at
      // every launch, so that threads that launch other sizes at the same time do not interfere.
      C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_memory())));
      // so that as many blocks run at once as their shared memory allows; the L1 cache gets the rest
      C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared));
    }
    kernel<<<grid, block, shared_bytes, stream_>>>(args...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  at::TensorOptions byte_options_;
  const cudaDeviceProp& properties_;
  cudaStream_t stream_;
  std::vector<at::Tensor> workspaces_;
};

}  // namespace drot
