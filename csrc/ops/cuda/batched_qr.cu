// batched_qr on the GPU: one thread block per matrix up to kSmallQr; Cholesky or Householder QR of ATen
// beyond.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>

#include "common/cuda/launcher.cuh"
#include "common/no_autocast.h"
#include "ops/batched_qr.h"
#include "ops/batched_qr_math.h"

namespace drot {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 16;

// A thread block as a team (ops/batched_qr_math.h): a lane owns every 32nd element of a column.
template <typename T>
struct BlockTeam {
  static constexpr int kColumns = 2;
  int ld;

  __device__ int lane() const { return threadIdx.x % kWarp; }
  __device__ int warp() const { return threadIdx.x / kWarp; }
  __device__ int warps() const { return blockDim.x / kWarp; }
  __device__ void sync() const { __syncthreads(); }
  __device__ void warp_sync() const { __syncwarp(); }
  __device__ bool owns(int i) const { return i % kWarp == lane(); }
  __device__ int first(int k) const { return k / kWarp * kWarp; }

  template <int C>
  __device__ void dots(const T* v, const T* y, int first, T* out) const {
    T sum[C] = {};
    for (int i = first + lane(); i < ld; i += kWarp) {
      const T x = v[i];
#pragma unroll
      for (int c = 0; c < C; ++c) sum[c] += x * y[c * ld + i];
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      for (int step = kWarp / 2; step > 0; step /= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
      out[c] = sum[c];
    }
  }

  template <int C>
  __device__ void axpys(const T* w, const T* v, T* y, int first) const {
    for (int i = first + lane(); i < ld; i += kWarp) {
      const T x = v[i];
#pragma unroll
      for (int c = 0; c < C; ++c) y[c * ld + i] += w[c] * x;
    }
  }

  __device__ void set_unit(T* y, int one) const {
    for (int i = lane(); i < ld; i += kWarp) y[i] = i == one ? 1 : 0;
  }
};

// max |x[i]|, returned to every thread; NaN is ignored. shared: one value per warp.
template <typename T>
__device__ T block_largest(const T* x, int count, T* shared) {
  T largest = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) largest = fmax(largest, fabs(x[i]));
  for (int step = kWarp / 2; step > 0; step /= 2) {
    largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = largest;
  __syncthreads();
  for (int w = 0; w < blockDim.x / kWarp; ++w) largest = fmax(largest, shared[w]);
  return largest;
}

// One block per matrix.
//
// Args:
//   columns: [batch, n, n], the transposed input.
//   q_columns: [batch, n, ld], is written: q, transposed.
//   r: [batch, n, n], is written.
//   work: [batch, n, ld], used unless kInShared: the matrix does not fit into shared memory, which then holds
//     only tau.
//   n: rows and columns of a matrix.
//   ld: n, rounded up to a multiple of kWarp.
template <typename T, bool kInShared>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    small_qr_kernel(const T* __restrict__ columns, T* q_columns, T* r, T* work, int n, int ld) {
  extern __shared__ double shared_memory[];  // double for the alignment
  __shared__ T largest_of_warp[kMaxWarps];
  static_assert(sizeof(largest_of_warp) <= kStaticShared);
  T* tau = reinterpret_cast<T*>(shared_memory);
  T* a = kInShared ? tau + ld : work + static_cast<int64_t>(blockIdx.x) * n * ld;
  columns += static_cast<int64_t>(blockIdx.x) * n * n;
  r += static_cast<int64_t>(blockIdx.x) * n * n;
  q_columns += static_cast<int64_t>(blockIdx.x) * n * ld;

  const T scale = scale_to_one(block_largest(columns, n * n, largest_of_warp));
  for (int e = threadIdx.x; e < n * ld; e += blockDim.x) {
    const int j = e / ld, i = e % ld;
    a[e] = i < n ? columns[j * n + i] * scale : 0;
  }
  for (int e = threadIdx.x; e < n * n; e += blockDim.x) r[e] = 0;
  __syncthreads();
  const BlockTeam<T> team{ld};
  householder_factor(team, a, tau, r, n, 1 / scale);
  householder_form_q(team, a, tau, q_columns, n);
}

template <typename T>
void launch_small_qr(const at::Tensor& columns, at::Tensor& q_columns, at::Tensor& r) {
  const int n = static_cast<int>(columns.size(-1)), ld = static_cast<int>(q_columns.size(-1));
  const unsigned batch = static_cast<unsigned>(columns.size(0));
  const int warps = std::min(kMaxWarps, (n + BlockTeam<T>::kColumns - 1) / BlockTeam<T>::kColumns);
  const int64_t matrix_bytes = int64_t{sizeof(T)} * n * ld, tau_bytes = int64_t{sizeof(T)} * ld;
  Launcher launcher(columns);
  const auto run = [&](auto* kernel, T* work, int64_t shared_bytes) {
    launcher.launch(kernel, dim3(batch), dim3(warps * kWarp), shared_bytes, columns.const_data_ptr<T>(),
                    q_columns.mutable_data_ptr<T>(), r.mutable_data_ptr<T>(), work, n, ld);
  };
  if (matrix_bytes + tau_bytes <= launcher.shared_memory()) {
    run(small_qr_kernel<T, true>, nullptr, matrix_bytes + tau_bytes);
  } else {
    run(small_qr_kernel<T, false>, launcher.allocate<T>(columns.size(0) * n * ld), tau_bytes);
  }
}

std::tuple<at::Tensor, at::Tensor> small_qr_cuda(const at::Tensor& a) {
  const int64_t n = a.size(-1), ld = (n + kWarp - 1) / kWarp * kWarp;
  const at::Tensor columns = a.reshape({-1, n, n}).mT().contiguous();
  at::Tensor q_columns = at::empty({columns.size(0), n, ld}, a.options());
  at::Tensor r = at::empty(columns.sizes(), a.options());
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "batched_qr",
                             [&] { launch_small_qr<scalar_t>(columns, q_columns, r); });
  return {q_columns.narrow(-1, 0, n).mT().contiguous().view(a.sizes()), r.view(a.sizes())};
}

// Whether the current device computes in fp64 fast enough for CholeskyQR (ops/batched_qr_math.h).
bool has_fast_fp64() {
  int device = 0, ratio = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device));
  return cholesky_qr_pays(ratio);
}

std::tuple<at::Tensor, at::Tensor> batched_qr_cuda(const at::Tensor& a) {
  check_batched_qr(a);
  const c10::cuda::CUDAGuard guard(a.device());
  if (a.numel() == 0) {
    return {at::empty(a.sizes(), a.options()), at::empty(a.sizes(), a.options())};
  }
  if (a.size(-1) <= kSmallQr) {
    return small_qr_cuda(a);
  }
  if (a.scalar_type() == at::kFloat && has_fast_fp64()) {
    auto [q, r, reliable] = cholesky_qr(a);
    // the only synchronisation: one byte is copied after all work is queued
    if (reliable.all().item<bool>()) {
      return {q, r};
    }
  }
  return householder_qr(a);
}

at::Tensor batched_qr_backward_cuda(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r) {
  check_batched_qr_backward(gq, q, r);
  const NoAutocast no_autocast;
  const c10::cuda::CUDAGuard guard(q.device());
  return q.numel() == 0 ? at::empty(q.sizes(), q.options()) : qr_backward(gq, q, r);
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) {
  m.impl("batched_qr", &batched_qr_cuda);
  m.impl("batched_qr_backward", &batched_qr_backward_cuda);
}

}  // namespace drot
