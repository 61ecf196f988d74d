// DROT_HOST_DEVICE marks arithmetic that the CPU and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define DROT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DROT_HOST_DEVICE inline __attribute__((always_inline))
#endif

// Unrolls the loop that follows on the GPU, where its arrays then live in registers.
#ifdef __CUDA_ARCH__
#define DROT_UNROLL _Pragma("unroll")
#else
#define DROT_UNROLL
#endif
