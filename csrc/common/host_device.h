// DROT_HOST_DEVICE marks functions that CPU and CUDA kernels share; DROT_UNROLL unrolls a loop on a GPU.
#pragma once

#ifdef __CUDACC__
#define DROT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DROT_HOST_DEVICE inline __attribute__((always_inline))
#endif

// DROT_UNROLL stands before a loop. On a GPU, arrays that an unrolled loop indexes stay in registers.
#ifdef __CUDA_ARCH__
#define DROT_UNROLL _Pragma("unroll")
#else
#define DROT_UNROLL
#endif
