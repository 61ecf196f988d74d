// Runs csrc/ops/batched_qr_math.h with a team of CPU threads, one for each lane of a CUDA block of kWarps
// warps of kLanes lanes, for test_householder_team.py. Compiled with ThreadSanitizer, it shows that the
// barriers suffice. Prints, for each n, the largest elements of |qᵀq - 1| and of |q r - a|.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "ops/batched_qr_math.h"

namespace {

constexpr int kLanes = 4;
constexpr int kWarps = 3;

std::barrier<> block_barrier(kLanes* kWarps);
std::barrier<> warp_barriers[kWarps] = {std::barrier<>(kLanes), std::barrier<>(kLanes),
                                        std::barrier<>(kLanes)};
std::atomic<unsigned> arrived[kWarps];
std::atomic<float> mailbox[kWarps][kLanes];
thread_local unsigned phase = 0;

struct ThreadTeam {
  static constexpr int kColumns = 2;
  int ld;
  int thread;

  int lane() const { return thread % kLanes; }
  int warp() const { return thread / kLanes; }
  int warps() const { return kWarps; }
  void sync() const { block_barrier.arrive_and_wait(); }
  void warp_sync() const { warp_barriers[warp()].arrive_and_wait(); }
  bool owns(int i) const { return i % kLanes == lane(); }
  int first(int k) const { return k / kLanes * kLanes; }

  // Waits for the warp. The atomics are relaxed because a shuffle does not order memory either.
  void meet() const {
    const unsigned target = ++phase * kLanes;
    arrived[warp()].fetch_add(1, std::memory_order_relaxed);
    while (arrived[warp()].load(std::memory_order_relaxed) < target) {
      std::this_thread::yield();
    }
  }

  template <int C>
  void dots(const float* v, const float* y, int first, float* out) const {
    for (int c = 0; c < C; ++c) {
      float sum = 0;
      for (int i = first + lane(); i < ld; i += kLanes) {
        sum += v[i] * y[c * ld + i];
      }
      mailbox[warp()][lane()].store(sum, std::memory_order_relaxed);
      meet();
      out[c] = 0;
      for (int l = 0; l < kLanes; ++l) {
        out[c] += mailbox[warp()][l].load(std::memory_order_relaxed);
      }
      meet();
    }
  }

  template <int C>
  void axpys(const float* w, const float* v, float* y, int first) const {
    for (int c = 0; c < C; ++c) {
      for (int i = first + lane(); i < ld; i += kLanes) {
        y[c * ld + i] += w[c] * v[i];
      }
    }
  }

  void set_unit(float* y, int one) const {
    for (int i = lane(); i < ld; i += kLanes) {
      y[i] = i == one;
    }
  }
};

void check(int n) {
  const int ld = (n + kLanes - 1) / kLanes * kLanes;
  std::vector<float> a(n * ld), q(n * ld), r(n * n), tau(ld);
  std::mt19937 generator(n);
  std::normal_distribution<float> normal;
  for (int j = 0; j < n; ++j) {
    std::generate_n(a.begin() + j * ld, n, [&] { return normal(generator); });
  }
  const std::vector<float> original = a;
  std::vector<std::thread> threads;
  for (int id = 0; id < kLanes * kWarps; ++id) {
    threads.emplace_back([&, id] {
      const ThreadTeam team{ld, id};
      drot::householder_factor(team, a.data(), tau.data(), r.data(), n, 1.f);
      drot::householder_form_q(team, a.data(), tau.data(), q.data(), n);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (auto& count : arrived) {
    count = 0;
  }
  double orthogonality = 0, residual = 0;
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      double gram = 0, product = 0;
      for (int k = 0; k < n; ++k) {
        gram += double(q[i * ld + k]) * q[j * ld + k];
        product += k <= j ? double(q[k * ld + i]) * r[k * n + j] : 0;
      }
      orthogonality = std::max(orthogonality, std::abs(gram - (i == j)));
      residual = std::max(residual, std::abs(product - original[j * ld + i]));
    }
  }
  std::printf("%d %.3e %.3e\n", n, orthogonality, residual);
}

}  // namespace

int main() {
  for (const int n : {1, 2, 3, 7, 13, 22}) {
    check(n);
  }
}
