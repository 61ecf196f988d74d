// What the launch code of an op asks of the GPU: its size, memory, and to start a kernel. A test gives
// that code a CPU with the same members instead.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <cstdint>
#include <type_traits>
#include <vector>

namespace drot {

// Refuses a matrix of more tiles of 16 columns, or of 8 rows, than a grid has blocks.
inline void check_fits_grid(const at::Tensor& y) {
  TORCH_CHECK_VALUE(y.size(0) / 8 < INT32_MAX && y.size(1) / 16 < INT32_MAX, "y is too large: ", y.sizes());
}

// The current device and stream. `on` is any tensor of that device.
class Gpu {
 public:
  explicit Gpu(const at::Tensor& on)
      : bytes_(on.options().dtype(at::kByte)),
        properties_(*at::cuda::getCurrentDeviceProperties()),
        stream_(at::cuda::getCurrentCUDAStream()) {}

  int processors() const { return properties_.multiProcessorCount; }

  // Bytes of dynamic shared memory that a block may have; the kernel's static arrays need a little too.
  int64_t shared_memory() const { return static_cast<int64_t>(properties_.sharedMemPerBlockOptin) - 1024; }

  // Memory that lasts until this object goes, and for the kernels started before then.
  template <class T>
  T* room(int64_t count) {
    rooms_.push_back(at::empty({count * static_cast<int64_t>(sizeof(T))}, bytes_));
    return reinterpret_cast<T*>(rooms_.back().mutable_data_ptr());
  }

  template <class... P>
  void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared, std::type_identity_t<P>... args) {
    if (shared > 0) {  // without it 48 KB is all, the static arrays included
      // the same number at every launch, so that threads that launch other sizes do not disturb this one
      C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_memory())));
    }
    kernel<<<grid, block, shared, stream_>>>(args...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  at::TensorOptions bytes_;
  const cudaDeviceProp& properties_;
  cudaStream_t stream_;
  std::vector<at::Tensor> rooms_;
};

}  // namespace drot
