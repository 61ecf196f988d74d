// The polynomials of spectral_step, in the form in which its kernel applies them.
#pragma once

#include <cmath>
#include <cstddef>

#include "ops/polar_start_math.h"

namespace drot {

constexpr int kMostSpectralSide = 128;
constexpr int kMostFurtherPolynomials = 7;

// A polynomial x p of a skew-symmetric x, as a function of the symmetric h = x xᵀ = -x²:
//   p = constant + factor · h             if root is 0: a + b xᵀx
//   p = constant + (root · h + middle)²   otherwise: a + b xᵀx + c (xᵀx)² without a sum of two matrices
struct FurtherPolynomial {
  float root, middle, factor, constant;
};

struct SpectralPolynomials {
  PolarCoefficients first;
  FurtherPolynomial further[kMostFurtherPolynomials];
  int further_count;
};

// coefficients: a, b and c of each polynomial, `numbers` numbers in all, which check_spectral_step admits.
inline SpectralPolynomials spectral_polynomials(const double* coefficients, size_t numbers, double margin) {
  SpectralPolynomials p{};
  p.first = {static_cast<float>(coefficients[0]), static_cast<float>(coefficients[1]),
             static_cast<float>(coefficients[2]), static_cast<float>(margin)};
  for (size_t i = 3; i + 2 < numbers; i += 3) {
    const double a = coefficients[i], b = coefficients[i + 1], c = coefficients[i + 2];
    FurtherPolynomial& to = p.further[p.further_count++];
    if (c == 0) {
      to = {0, 0, static_cast<float>(b), static_cast<float>(a)};
    } else {
      const double root = std::sqrt(c);
      to = {static_cast<float>(root), static_cast<float>(b / (2 * root)), 1,
            static_cast<float>(a - b * b / (4 * c))};
    }
  }
  return p;
}

}  // namespace drot
