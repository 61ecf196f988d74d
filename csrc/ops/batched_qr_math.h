// Householder QR of one small matrix by a team of threads, for the CPU and the CUDA kernel of batched_qr.
//
// A team is `warps` warps of `lanes` lanes. On a CPU it is one thread: one warp with one lane, which works on
// SIMD vectors. Matrices are column-major. Their leading dimension is padded with zeros to a multiple of the
// lanes, so that a column is read in whole vectors. Element i of a column belongs to the lane for which
// owns(i) is true.
//
// A reflector H = I - tau v vᵀ maps a column to +|column| e_k (Golub & Van Loan, algorithm 5.1.1). Then
// diag(R) >= 0, and no sign has to be changed afterwards.
#pragma once

#include <cmath>
#include <limits>

#include "common/host_device.h"

namespace drot {

// Whether CholeskyQR in fp64 (batched_qr.h) is faster than Householder QR in fp32 on a GPU whose fp32 rate is
// `ratio` times its fp64 rate: 2 on A100, H100 and B200; 32 or 64 on GeForce, L40 and A10. CholeskyQR takes
// about as many operations as Householder QR, nearly all of them in matrix products, and Householder QR runs
// far below the rate of products.
constexpr bool cholesky_qr_pays(int ratio) { return ratio <= 8; }
static_assert(cholesky_qr_pays(2) && !cholesky_qr_pays(32) && !cholesky_qr_pays(64));

template <typename T>
struct Reflector {
  T head;  // v at the pivot; below the pivot v is the column itself
  T tau;
  T beta;  // diagonal element of R
};

// alpha: the pivot; sigma: the sum of squares below the pivot. The largest element of the matrix is near 1.
template <typename T>
DROT_HOST_DEVICE Reflector<T> make_reflector(T alpha, T sigma) {
  // Below this sum the squares lose digits, and v would not be a direction. The elements below the pivot are
  // then < 1e-15 (fp64: 1e-146) of the largest element, and dropping them changes less than rounding does.
  constexpr T kNoTail = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
  if (sigma < kNoTail) {
    return alpha < 0 ? Reflector<T>{1, 2, -alpha} : Reflector<T>{0, 0, std::fabs(alpha)};
  }
  const T norm = std::sqrt(alpha * alpha + sigma);
  // alpha - norm without cancellation
  const T head = alpha <= 0 ? alpha - norm : -sigma / (alpha + norm);
  return {head, 2 / (head * head + sigma), norm};
}

// y <- H y for C columns.
template <int C, typename Team, typename T>
DROT_HOST_DEVICE void reflect(const Team& team, const T* v, T tau, T* y, int first) {
  T w[C];
  team.template dots<C>(v, y, first, w);
  for (int c = 0; c < C; ++c) {
    w[c] *= -tau;
  }
  team.template axpys<C>(w, v, y, first);
}

// y <- H y for `count` <= kColumns columns.
template <typename Team, typename T>
DROT_HOST_DEVICE void reflect_some(const Team& team, const T* v, T tau, T* y, int first, int count) {
  if (count == Team::kColumns) {
    reflect<Team::kColumns>(team, v, tau, y, first);
  } else {
    for (int c = 0; c < count; ++c) {
      reflect<1>(team, v, tau, y + c * team.ld, first);
    }
  }
}

// One warp turns column k, whose rows above k are zero by then, into v.
template <typename Team, typename T>
DROT_HOST_DEVICE void make_pivot(const Team& team, T* a, T* tau, T* r, int n, int k, T unscale) {
  T* x = a + k * team.ld;
  team.warp_sync();  // another lane may have written x[k]
  const T alpha = x[k];
  team.warp_sync();
  if (team.owns(k)) {
    x[k] = 0;
  }
  T sigma;
  team.template dots<1>(x, x, team.first(k), &sigma);
  const Reflector<T> h = make_reflector(alpha, sigma);
  if (team.owns(k)) {
    x[k] = h.head;
    tau[k] = h.tau;
    r[k * n + k] = h.beta * unscale;
  }
}

// a [n, ld]: the columns of the scaled matrix, replaced by the vectors v. tau [n]. r [n, n] row-major: only
// the upper triangle is written, multiplied by `unscale`.
template <typename Team, typename T>
DROT_HOST_DEVICE void householder_factor(const Team& team, T* a, T* tau, T* r, int n, T unscale) {
  constexpr int C = Team::kColumns;
  if (team.warp() == 0) {
    make_pivot(team, a, tau, r, n, 0, unscale);
  }
  team.sync();
  for (int k = 0; k < n; ++k) {
    for (int j = k + 1 + C * team.warp(); j < n; j += C * team.warps()) {
      T* y = a + j * team.ld;
      const int count = n - j < C ? n - j : C;
      reflect_some(team, a + k * team.ld, tau[k], y, team.first(k), count);
      if (team.owns(k)) {  // row k of R is final; zeros in its place make every later v zero above its pivot
        for (int c = 0; c < count; ++c) {
          r[k * n + j + c] = y[c * team.ld + k] * unscale;
          y[c * team.ld + k] = 0;
        }
      }
      if (j == k + 1) {
        make_pivot(team, a, tau, r, n, k + 1, unscale);
      }
    }
    team.sync();
  }
}

// q [n, ld]: the columns of Q = H_0 H_1 … H_{n-1}. Every warp computes its own columns, without a barrier.
template <typename Team, typename T>
DROT_HOST_DEVICE void householder_form_q(const Team& team, const T* a, const T* tau, T* q, int n) {
  constexpr int C = Team::kColumns;
  for (int j = C * team.warp(); j < n; j += C * team.warps()) {
    T* y = q + j * team.ld;
    const int count = n - j < C ? n - j : C;
    for (int c = 0; c < count; ++c) {
      team.set_unit(y + c * team.ld, j + c);
    }
    for (int k = j + count - 1; k >= 0; --k) {  // later reflectors do not change these columns
      reflect_some(team, a + k * team.ld, tau[k], y, team.first(k), count);
    }
  }
}

// The power of two that scales `largest` to about 1; 1 for 0, inf and NaN.
template <typename T>
DROT_HOST_DEVICE T scale_to_one(T largest) {
  if (!(largest > 0) || !(largest <= std::numeric_limits<T>::max())) {
    return 1;
  }
  const int exponent = std::ilogb(largest);
  // the reciprocal must be finite too
  const int limit = std::numeric_limits<T>::max_exponent - 2;
  return std::ldexp(T(1), exponent < -limit ? limit : -exponent);
}

}  // namespace drot
