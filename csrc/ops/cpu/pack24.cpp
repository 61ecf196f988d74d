#include "ops/pack24.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "ops/pack24_math.h"

namespace drot {
namespace {

// The fewest bytes of positions, of eight columns each, for which another thread is used.
constexpr int64_t kGrain = 1 << 12;

// kept = min(kept, value).
void keep_smallest(std::atomic<int64_t>& kept, int64_t value) {
  int64_t seen = kept.load();
  while (value < seen && !kept.compare_exchange_weak(seen, value)) {
  }
}

// Calls pack_or_unpack(i) for every byte i of positions. Returns the first row where it gives false, or
// `rows`.
template <typename F>
int64_t first_bad_row(int64_t rows, int64_t bytes_per_row, const F& pack_or_unpack) {
  std::atomic<int64_t> bad{rows};
  at::parallel_for(0, rows * bytes_per_row, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!pack_or_unpack(i)) {
        keep_smallest(bad, i / bytes_per_row);
        return;  // later bytes of this thread lie in later rows
      }
    }
  });
  return bad;
}

template <typename word_t>
int64_t pack(const at::Tensor& w, at::Tensor& values, at::Tensor& positions) {
  const auto* in = static_cast<const word_t*>(w.const_data_ptr());
  auto* out = static_cast<word_t*>(values.mutable_data_ptr());
  auto* position = positions.mutable_data_ptr<uint8_t>();
  return first_bad_row(w.size(0), w.size(1) / 8,
                       [=](int64_t i) { return pack24_byte(in + 8 * i, out + 4 * i, position + i); });
}

template <typename word_t>
int64_t unpack(const at::Tensor& values, const at::Tensor& positions, at::Tensor& w) {
  const auto* in = static_cast<const word_t*>(values.const_data_ptr());
  const auto* position = positions.const_data_ptr<uint8_t>();
  auto* out = static_cast<word_t*>(w.mutable_data_ptr());
  return first_bad_row(w.size(0), w.size(1) / 8,
                       [=](int64_t i) { return unpack24_byte(in + 4 * i, position[i], out + 8 * i); });
}

std::tuple<at::Tensor, at::Tensor> pack24_cpu(const at::Tensor& w_in) {
  check_pack24(w_in);
  const at::Tensor w = w_in.contiguous();
  const int64_t rows = w.size(0), columns = w.size(1);
  at::Tensor values = at::empty({rows, columns / 2}, w.options());
  at::Tensor positions = at::empty({rows, columns / 8}, w.options().dtype(at::kByte));
  const int64_t bad =
      w.element_size() == 2 ? pack<uint16_t>(w, values, positions) : pack<uint32_t>(w, values, positions);
  check_packed_row(bad, rows);
  return {values, positions};
}

at::Tensor unpack24_cpu(const at::Tensor& values_in, const at::Tensor& positions_in) {
  check_unpack24(values_in, positions_in);
  const at::Tensor values = values_in.contiguous(), positions = positions_in.contiguous();
  at::Tensor w = at::empty({values.size(0), 2 * values.size(1)}, values.options());
  const int64_t bad = values.element_size() == 2 ? unpack<uint16_t>(values, positions, w)
                                                 : unpack<uint32_t>(values, positions, w);
  check_unpacked_row(bad, w.size(0));
  return w;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) {
  m.impl("pack24", &pack24_cpu);
  m.impl("unpack24", &unpack24_cpu);
}

}  // namespace drot
