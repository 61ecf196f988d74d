// sparse24_linear and sparse24_compress on the GPU: the op, and its algorithms skinny (sparse24_skinny.cuh),
// cusparselt (sparse24_cusparselt.h) and dense, between which sparse24_autotuner.h chooses.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <algorithm>
#include <limits>
#include <sstream>
#include <vector>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launcher.cuh"
#include "common/no_autocast.h"
#include "ops/cuda/sparse24_autotuner.h"
#include "ops/cuda/sparse24_cusparselt.h"
#include "ops/cuda/sparse24_mma.cuh"
#include "ops/cuda/sparse24_skinny.cuh"
#include "ops/sparse24_linear.h"

namespace drot {
namespace {

// Up to kSkinnyOnlyTokens the skinny kernel is used without a measurement, since it reads W only once. Up to
// kSkinnyMostTokens it is a candidate of the autotuner.
constexpr int64_t kSkinnyOnlyTokens = 2 * kSkinnyTokens, kSkinnyMostTokens = 128;

// y = x Wᵀ (+ bias) (+ residual, or + residual · rotation). All tensors but the rotation are contiguous and
// aligned to 16 bytes.
struct Problem {
  at::Tensor x;                         // [tokens, in]
  at::Tensor values, positions;         // W [out, in], packed
  at::Tensor bias, residual, rotation;  // [out], [tokens, out], [out, out]; undefined if not given
  at::Tensor compressed;                // W, compressed; undefined if not given
  int64_t tokens, in, out;
};

template <class T>
const T* pointer(const at::Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.const_data_ptr()) : nullptr;
}

// ---- algorithms ----------------------------------------------------------------------------------

bool skinny_supports(const Problem& p) {
  return p.tokens <= kSkinnyMostTokens && p.x.element_size() == 2 && p.in > 0 && p.in % kSkinnyColumns == 0 &&
         p.out <= kMostSkinnyRows && at::cuda::getCurrentDeviceProperties()->major >= 8;
}

void run_skinny(const Problem& p, at::Tensor& y) {
  at::Tensor residual = p.residual, rotation = p.rotation;
  if (rotation.defined() && p.out % kRotationColumns) {  // the kernel cannot rotate in this size
    residual = at::mm(residual, rotation);
    rotation = at::Tensor();
  }
  // no copy where the rotation lies by columns
  const at::Tensor transposed = rotation.defined() ? contiguous_aligned(rotation.t()) : at::Tensor();
  const SkinnyProblem skinny{.x = pointer<uint16_t>(p.x),
                             .values = pointer<uint16_t>(p.values),
                             .positions = pointer<uint8_t>(p.positions),
                             .bias = pointer<uint16_t>(p.bias),
                             .residual = pointer<uint16_t>(residual),
                             .rotation = pointer<uint16_t>(transposed),
                             .y = static_cast<uint16_t*>(y.mutable_data_ptr()),
                             .in = p.in,
                             .out = p.out,
                             .tokens = static_cast<int>(p.tokens)};
  Launcher launcher(y);
  y.scalar_type() == at::kBFloat16 ? run_sparse24_skinny<Bf16Element>(launcher, skinny)
                                   : run_sparse24_skinny<Fp16Element>(launcher, skinny);
}

// Whether the product is added to something.
bool has_addends(const Problem& p) { return p.residual.defined() || p.bias.defined(); }

// y += bias + residual (· rotation), each rounded. The product comes before: on an H200, 2048 tokens and
// a rotation of 4096 x 14336 took 386 us where cuSPARSELt added to y, and 346 us where it writes y.
void add_addends(const Problem& p, at::Tensor& y) {
  if (p.rotation.defined()) {
    y.addmm_(p.residual, p.rotation);
  } else if (p.residual.defined()) {
    y.add_(p.residual);
  }
  if (p.bias.defined()) y.add_(p.bias);
}

void run(const Choice& choice, const Problem& p, at::Tensor& y) {
  if (choice.algorithm == Algorithm::skinny) return run_skinny(p, y);
  if (choice.algorithm == Algorithm::cusparselt) {
    cusparselt::matmul(p.compressed, p.x, y, choice.config);
  } else {  // by cuBLAS
    at::mm_out(y, p.x, unpack24_unchecked_cuda(p.values, p.positions).t());
  }
  add_addends(p, y);
}

// ---- the choice of an algorithm ------------------------------------------------------------------

// The key of a product in the tuning cache: what its fastest algorithm depends on. Of the driver, the runtime
// of CUDA tells only the newest CUDA that it supports. So a choice outlives an update of the driver within
// one version of CUDA.
std::string tuning_key(const Problem& p, std::span<const Algorithm> candidates) {
  int cuda = 0, driver = 0;
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&cuda));
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  const bool has_cusparselt = std::ranges::count(candidates, Algorithm::cusparselt) > 0;
  std::ostringstream key;
  key << "sparse24_linear of drot " << DROT_VERSION << ", " << at::cuda::getCurrentDeviceProperties()->name
      << ", CUDA " << cuda << ", driver " << driver << ", cuSPARSELt "
      << (has_cusparselt ? cusparselt::version() : 0) << ", " << p.x.scalar_type() << ' ' << p.out << 'x'
      << p.in
      << (p.rotation.defined() ? " + rotation"
          : has_addends(p)     ? " + addend"
                               : "")
      << ", up to " << token_bucket(p.tokens) << " tokens:";
  for (const Algorithm candidate : candidates) key << ' ' << name_of(candidate);
  return key.str();
}

// The median time of each candidate. The candidates run in turn, with a cold L2 cache, as in a model. The
// time is infinite if a candidate runs out of memory or cuSPARSELt fails.
std::vector<Measurement> measure(const Problem& p, std::span<const Algorithm> candidates) {
  constexpr size_t kRuns = 9;
  // another thread may capture a CUDA graph; the calls below must not invalidate it
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  std::vector<Measurement> results(candidates.size(), {std::numeric_limits<double>::infinity()});
  std::vector<std::vector<float>> milliseconds(candidates.size());
  at::Tensor y, l2_eviction;
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  const auto succeeds = [](const auto& work) {
    try {
      work();
      return true;
    } catch (const c10::OutOfMemoryError&) {
      return false;
    } catch (const cusparselt::Error& error) {
      TORCH_WARN("sparse24_linear does not use cuSPARSELt for this product: ", error.what());
      return false;
    }
  };
  if (!succeeds([&] {
        y = at::empty({p.tokens, p.out}, p.x.options());
        const int64_t bytes = 4 * at::cuda::getCurrentDeviceProperties()->l2CacheSize;
        l2_eviction = at::empty({bytes}, p.positions.options());
      })) {
    return results;
  }
  std::vector<bool> usable(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    usable[i] = succeeds([&] {
      if (candidates[i] == Algorithm::cusparselt) {
        results[i].config = cusparselt::search_config(p.compressed, p.x, p.out);
      }
      run({candidates[i], results[i].config}, p, y);
    });
  }
  for (size_t repeat = 0; repeat < kRuns; ++repeat) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      usable[i] = usable[i] && succeeds([&] {
                    l2_eviction.zero_();
                    begin.record();
                    run({candidates[i], results[i].config}, p, y);
                    end.record();
                    end.synchronize();
                    milliseconds[i].push_back(begin.elapsed_time(end));
                  });
    }
  }
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (!usable[i]) continue;
    std::ranges::nth_element(milliseconds[i], milliseconds[i].begin() + kRuns / 2);
    results[i].seconds = 1e-3 * milliseconds[i][kRuns / 2];
  }
  return results;
}

Autotuner& autotuner() {
  static auto* const autotuner = new Autotuner;
  return *autotuner;
}

struct Chosen {
  Choice choice;
  std::string key;  // the key of the product in the autotuner; empty if there was nothing to choose
};

Chosen choose(const Problem& p) {
  if (p.tokens <= kSkinnyOnlyTokens && skinny_supports(p)) return {{Algorithm::skinny}};
  // The autotuner returns the first if it may not measure. With 64 tokens of 4096 x 14336 an H200 took 40 us
  // by the skinny kernel and 97 us by cuSPARSELt.
  std::vector<Algorithm> candidates;
  const bool few = p.tokens <= Skinny64::kTokens;
  if (few && skinny_supports(p)) candidates.push_back(Algorithm::skinny);
  const bool compressed = p.compressed.defined() && p.compressed.numel() > 0;
  const auto supported = [&p](const char** reason) {
    return cusparselt::supports(p.x.scalar_type(), p.out, p.in, p.tokens, reason);
  };
  const char* no_cusparselt =
      compressed ? nullptr
                 : "the call has no compressed weight, which sparse24_compress makes; experts have none";
  if (compressed && supported(&no_cusparselt)) candidates.push_back(Algorithm::cusparselt);
  if (!few && skinny_supports(p)) candidates.push_back(Algorithm::skinny);
  candidates.push_back(Algorithm::dense);
  Chosen chosen{{candidates.front()}};
  const bool capturing = at::cuda::currentStreamCaptureStatus() != at::cuda::CaptureStatus::None;
  if (candidates.size() > 1) {
    chosen.key = tuning_key(p, candidates);
    chosen.choice =
        autotuner().choose(chosen.key, candidates, /*may_measure=*/!capturing,
                           [&](std::span<const Algorithm> measured) { return measure(p, measured); });
  }
  if (chosen.choice.algorithm == Algorithm::dense && no_cusparselt) {
    // sparse24_compress makes none where cuSPARSELt does not support the weight. A graph's capture asks
    // nothing new of the driver.
    const char* unsupported = nullptr;
    if (!compressed && !capturing && !supported(&unsupported)) no_cusparselt = unsupported;
    TORCH_WARN_ONCE("sparse24_linear unpacks the weight at each call with ", p.tokens,
                    " tokens, which is slow: ", no_cusparselt);
  }
  return chosen;
}

// Computes y with the chosen algorithm. A product that cuSPARSELt refuses is computed by the dense algorithm,
// in this call and, outside of the capture of a CUDA graph, in later ones.
void run_chosen(const Problem& p, at::Tensor& y) {
  const Chosen chosen = choose(p);
  try {
    run(chosen.choice, p, y);
  } catch (const cusparselt::Error& error) {
    TORCH_WARN_ONCE("cuSPARSELt refuses a product of ", p.tokens, " tokens with a weight of ", p.out, " x ",
                    p.in, "; sparse24_linear unpacks the weight and multiplies densely. ", error.what());
    if (!chosen.key.empty()) autotuner().replace(chosen.key, {Algorithm::dense});
    run({Algorithm::dense}, p, y);
  }
}

// ---- the ops -------------------------------------------------------------------------------------

at::Tensor sparse24_linear_cuda(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                const OptionalTensor& bias, const OptionalTensor& residual,
                                const OptionalTensor& rotation, const OptionalTensor& compressed) {
  check_sparse24_linear(x, values, positions, bias, residual, rotation, compressed);
  const NoAutocast no_autocast;
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t out = values.size(0), in = 2 * values.size(1);
  at::Tensor result = at::empty(sparse24_linear_sizes(x, out), x.options());
  if (result.numel() == 0) return result;
  const int64_t tokens = result.numel() / out;
  const auto optional = [](const OptionalTensor& t) { return t ? contiguous_aligned(*t) : at::Tensor(); };
  const Problem p{.x = contiguous_aligned(x.reshape({tokens, in})),
                  .values = contiguous_aligned(values),
                  .positions = contiguous_aligned(positions),
                  .bias = optional(bias),
                  .residual = residual ? contiguous_aligned(residual->reshape({tokens, out})) : at::Tensor(),
                  .rotation = rotation.value_or(at::Tensor()),
                  .compressed = optional(compressed),
                  .tokens = tokens,
                  .in = in,
                  .out = out};
  at::Tensor y = result.view({tokens, out});
  run_chosen(p, y);
  return result;
}

at::Tensor sparse24_compress_cuda(const at::Tensor& values, const at::Tensor& positions) {
  check_unpack24(values, positions);
  const c10::cuda::CUDAGuard guard(values.device());
  const int64_t out = values.size(0), in = 2 * values.size(1);
  if (!cusparselt::supports(values.scalar_type(), out, in, /*tokens=*/1)) {
    return at::empty({0}, positions.options());
  }
  try {
    return cusparselt::compress(
        unpack24_unchecked_cuda(contiguous_aligned(values), contiguous_aligned(positions)));
  } catch (const cusparselt::Error& error) {
    TORCH_WARN_ONCE("cuSPARSELt refuses to compress a weight of ", out, " x ", in,
                    "; products of many tokens with it unpack it at each call. ", error.what());
    return at::empty({0}, positions.options());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) {
  m.impl("sparse24_linear", &sparse24_linear_cuda);
  m.impl("sparse24_compress", &sparse24_compress_cuda);
}

}  // namespace drot
