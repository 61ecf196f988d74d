#include "ops/cpu/batched_qr_small.h"

#include <cstring>

#include "ops/batched_qr_math.h"

namespace drot::DROT_SIMD {
namespace {

constexpr int kVectorBytes = 32;

template <typename T>
struct Vector {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T))));
  static constexpr int kSize = kVectorBytes / sizeof(T);
};

// The team of ops/batched_qr_math.h that is one CPU thread on SIMD vectors.
template <typename T>
struct OneThread {
  using V = typename Vector<T>::type;
  static constexpr int kColumns = 8;
  static constexpr int kLanes = Vector<T>::kSize;
  int ld;

  int warp() const { return 0; }
  int warps() const { return 1; }
  void sync() const {}
  void warp_sync() const {}
  bool owns(int) const { return true; }
  int first(int k) const { return k / kLanes * kLanes; }

  template <int C>
  void dots(const T* v, const T* y, int first, T* out) const {
    V sum[C] = {};
    for (int i = first; i < ld; i += kLanes) {
      const V x = *reinterpret_cast<const V*>(v + i);
      for (int c = 0; c < C; ++c) {
        sum[c] += x * *reinterpret_cast<const V*>(y + c * ld + i);
      }
    }
    for (int c = 0; c < C; ++c) {
      T total = 0;
      for (int l = 0; l < kLanes; ++l) {
        total += sum[c][l];
      }
      out[c] = total;
    }
  }

  template <int C>
  void axpys(const T* w, const T* v, T* y, int first) const {
    for (int i = first; i < ld; i += kLanes) {
      const V x = *reinterpret_cast<const V*>(v + i);
      for (int c = 0; c < C; ++c) {
        *reinterpret_cast<V*>(y + c * ld + i) += w[c] * x;
      }
    }
  }

  void set_unit(T* y, int one) const {
    std::memset(y, 0, ld * sizeof(T));
    y[one] = 1;
  }
};

template <typename T>
void qr(const T* a, T* q, T* r, T* work, int n) {
  const OneThread<T> team{(n + kQrPad - 1) / kQrPad * kQrPad};
  const int ld = team.ld;
  T* columns = work;
  T* q_columns = work + ld * ld;
  T* tau = work + 2 * ld * ld;
  T largest = 0;
  for (int i = 0; i < n * n; ++i) {
    const T size = std::fabs(a[i]);
    largest = size > largest ? size : largest;
  }
  const T scale = scale_to_one(largest);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < n; ++i) {
      columns[j * ld + i] = a[i * n + j] * scale;
    }
    for (int i = n; i < ld; ++i) {
      columns[j * ld + i] = 0;
    }
  }
  std::memset(r, 0, n * n * sizeof(T));
  householder_factor(team, columns, tau, r, n, 1 / scale);
  householder_form_q(team, columns, tau, q_columns, n);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      q[i * n + j] = q_columns[j * ld + i];
    }
  }
}

// Solves kVectors vectors of columns of bt from column `begin` on, from the last row up.
template <int kVectors, typename T>
void solve_columns(const T* r, T* bt, int n, int begin) {
  using V = typename Vector<T>::unaligned;
  constexpr int L = Vector<T>::kSize;
  for (int j = n - 1; j >= 0; --j) {
    V sum[kVectors] = {};
    for (int k = j + 1; k < n; ++k) {
      const T factor = r[j * n + k];
      for (int v = 0; v < kVectors; ++v) {
        sum[v] += factor * *reinterpret_cast<const V*>(bt + k * n + begin + v * L);
      }
    }
    const T inverse = 1 / r[j * n + j];
    for (int v = 0; v < kVectors; ++v) {
      V& target = *reinterpret_cast<V*>(bt + j * n + begin + v * L);
      target = (target - sum[v]) * inverse;
    }
  }
}

template <typename T>
void solve(const T* r, T* bt, T* x, int n) {
  constexpr int L = Vector<T>::kSize;
  int begin = 0;
  for (; begin + 8 * L <= n; begin += 8 * L) {
    solve_columns<8>(r, bt, n, begin);
  }
  for (; begin + L <= n; begin += L) {
    solve_columns<1>(r, bt, n, begin);
  }
  for (; begin < n; ++begin) {
    for (int j = n - 1; j >= 0; --j) {
      T sum = 0;
      for (int k = j + 1; k < n; ++k) {
        sum += r[j * n + k] * bt[k * n + begin];
      }
      bt[j * n + begin] = (bt[j * n + begin] - sum) * (1 / r[j * n + j]);
    }
  }
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      x[i * n + j] = bt[j * n + i];
    }
  }
}

}  // namespace

void small_qr(const float* a, float* q, float* r, float* work, int n) { qr(a, q, r, work, n); }
void small_qr(const double* a, double* q, double* r, double* work, int n) { qr(a, q, r, work, n); }
void small_solve(const float* r, float* bt, float* x, int n) { solve(r, bt, x, n); }
void small_solve(const double* r, double* bt, double* x, int n) { solve(r, bt, x, n); }

}  // namespace drot::DROT_SIMD
