#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/addmm.h>
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

#include "ops/cuda/gpu.cuh"
#include "ops/cuda/mma24.cuh"
#include "ops/cuda/sparse24_library.h"
#include "ops/cuda/sparse24_skinny.cuh"
#include "ops/cuda/sparse24_ways.h"
#include "ops/sparse24_linear.h"

namespace drot {
namespace {

// Up to kFewTokens the kernel for few tokens is taken unasked: it reads W once. Up to kSomeTokens it is
// one of the ways that are measured.
constexpr int64_t kFewTokens = 2 * kSkinnyTokens, kSomeTokens = 128;

// The arguments of one call, the tokens in one dimension, contiguous and aligned to 16 bytes.
struct Problem {
  at::Tensor x, values, positions;
  at::Tensor bias, residual, rotation, compressed;  // may be undefined
  int64_t tokens, in, out;
};

at::Tensor aligned(const at::Tensor& t) {
  const at::Tensor contiguous = t.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

template <class T>
const T* words_of(const at::Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.const_data_ptr()) : nullptr;
}

// ---- the ways ------------------------------------------------------------------------------------

bool few_takes(const Problem& p) {
  return p.tokens <= kSomeTokens && p.x.element_size() == 2 && p.in > 0 && p.in % kSkinnyColumns == 0 &&
         p.out <= kMostSkinnyRows && at::cuda::getCurrentDeviceProperties()->major >= 8;
}

void by_few(const Problem& p, at::Tensor& y) {
  at::Tensor residual = p.residual, rotation = p.rotation;
  if (rotation.defined() && p.out % kRotationColumns) {
    residual = at::mm(residual, rotation);
    rotation = at::Tensor();
  }
  const SkinnyProblem skinny{words_of<uint16_t>(p.x),
                             words_of<uint16_t>(p.values),
                             words_of<uint8_t>(p.positions),
                             words_of<uint16_t>(p.bias),
                             words_of<uint16_t>(residual),
                             words_of<uint16_t>(rotation),
                             static_cast<uint16_t*>(y.mutable_data_ptr()),
                             p.in,
                             p.out,
                             static_cast<int>(p.tokens)};
  Gpu gpu(y);
  y.scalar_type() == at::kBFloat16 ? run_sparse24_skinny<Bf16Element>(gpu, skinny)
                                   : run_sparse24_skinny<Fp16Element>(gpu, skinny);
}

// What is added to the product goes into y first; false where there is nothing to add.
bool write_added(const Problem& p, at::Tensor& y) {
  if (p.rotation.defined()) {
    p.bias.defined() ? at::addmm_out(y, p.bias, p.residual, p.rotation)
                     : at::mm_out(y, p.residual, p.rotation);
  } else if (p.residual.defined()) {
    y.copy_(p.residual);
    if (p.bias.defined()) y.add_(p.bias);
  } else if (p.bias.defined()) {
    y.copy_(p.bias.expand_as(y));
  }
  return p.residual.defined() || p.bias.defined();
}

void by_way(const Choice& choice, const Problem& p, at::Tensor& y) {
  if (choice.way == Way::few) return by_few(p, y);
  const bool add = write_added(p, y);
  if (choice.way == Way::library) {
    return sparse24_library::multiply(p.compressed, p.x, y, add, choice.algorithm);
  }
  const at::Tensor w = unpack24_unchecked_cuda(p.values, p.positions);
  add ? y.addmm_(p.x, w.t()) : at::mm_out(y, p.x, w.t());
}

// ---- which one -----------------------------------------------------------------------------------

std::string key_of(const Problem& p, std::span<const Way> ways) {
  int cuda = 0;
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&cuda));
  std::ostringstream key;
  key << "sparse24_linear of drot " << DROT_VERSION << ", " << at::cuda::getCurrentDeviceProperties()->name
      << ", CUDA " << cuda << ", cuSPARSELt "
      << (ways.front() == Way::library ? sparse24_library::version() : 0) << ", " << p.x.scalar_type() << ' '
      << p.out << 'x' << p.in << (p.rotation.defined() ? " + rotation" : "") << ", up to "
      << alike_tokens(p.tokens) << " tokens:";
  for (const Way way : ways) key << ' ' << kWayNames[static_cast<size_t>(way)];
  return key.str();
}

// Medians of runs in turn, each of which finds nothing of its own in the L2 cache, as in a model it would
// not. Infinite for a way that memory does not suffice for, or that the library refuses.
std::vector<Measured> measured(const Problem& p, std::span<const Way> ways) {
  constexpr size_t kRuns = 9;
  // a graph that another thread captures meanwhile must not fail for what is done here
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  std::vector<Measured> found(ways.size(), {std::numeric_limits<double>::infinity()});
  std::vector<std::vector<float>> milliseconds(ways.size());
  at::Tensor y, cache;
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  const auto tried = [](const auto& work) {
    try {
      work();
      return true;
    } catch (const c10::OutOfMemoryError&) {
      return false;
    } catch (const sparse24_library::Refused& refused) {
      TORCH_WARN("sparse24_linear goes without cuSPARSELt: ", refused.what());
      return false;
    }
  };
  if (!tried([&] {
        y = at::empty({p.tokens, p.out}, p.x.options());
        cache = at::empty({4 * at::cuda::getCurrentDeviceProperties()->l2CacheSize}, p.positions.options());
      })) {
    return found;
  }
  std::vector<bool> goes(ways.size());
  for (size_t i = 0; i < ways.size(); ++i) {
    goes[i] = tried([&] {
      if (ways[i] == Way::library) found[i].algorithm = sparse24_library::search(p.compressed, p.x, p.out);
      by_way({ways[i], found[i].algorithm}, p, y);
    });
  }
  for (size_t run = 0; run < kRuns; ++run) {
    for (size_t i = 0; i < ways.size(); ++i) {
      goes[i] = goes[i] && tried([&] {
                  cache.zero_();
                  begin.record();
                  by_way({ways[i], found[i].algorithm}, p, y);
                  end.record();
                  end.synchronize();
                  milliseconds[i].push_back(begin.elapsed_time(end));
                });
    }
  }
  for (size_t i = 0; i < ways.size(); ++i) {
    if (!goes[i]) continue;
    std::ranges::nth_element(milliseconds[i], milliseconds[i].begin() + kRuns / 2);
    found[i].seconds = 1e-3 * milliseconds[i][kRuns / 2];
  }
  return found;
}

Choice choice_for(const Problem& p) {
  if (p.tokens <= kFewTokens && few_takes(p)) return {Way::few};
  std::vector<Way> ways;  // the first is taken where nothing is known
  const char* no_library = "it was called without the weight that sparse24_compress makes";
  if (p.compressed.defined() && p.compressed.numel() > 0 &&
      sparse24_library::takes(p.x.scalar_type(), p.out, p.in, p.tokens, &no_library)) {
    ways.push_back(Way::library);
  }
  if (few_takes(p)) ways.push_back(Way::few);
  ways.push_back(Way::dense);
  Choice choice{ways.front()};
  if (ways.size() > 1) {
    static auto* const chosen = new ChosenWays;
    const bool captured = at::cuda::currentStreamCaptureStatus() != at::cuda::CaptureStatus::None;
    choice = chosen->of(key_of(p, ways), ways, !captured,
                        [&](std::span<const Way> of) { return measured(p, of); });
  }
  if (choice.way == Way::dense && ways.front() != Way::library) {
    TORCH_WARN_ONCE("sparse24_linear makes the weight dense at each call with ", p.tokens,
                    " tokens, which is slow: ", no_library);
  }
  return choice;
}

at::Tensor sparse24_linear_cuda(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                const OptionalTensor& bias, const OptionalTensor& residual,
                                const OptionalTensor& rotation, const OptionalTensor& compressed) {
  check_sparse24_linear(x, values, positions, bias, residual, rotation, compressed);
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t out = values.size(0), in = 2 * values.size(1);
  at::Tensor result = at::empty(sparse24_linear_sizes(x, out), x.options());
  if (result.numel() == 0) return result;
  const int64_t tokens = result.numel() / out;
  const auto optional = [](const OptionalTensor& t) { return t ? aligned(*t) : at::Tensor(); };
  const Problem p{aligned(x.reshape({tokens, in})),
                  aligned(values),
                  aligned(positions),
                  optional(bias),
                  residual ? aligned(residual->reshape({tokens, out})) : at::Tensor(),
                  optional(rotation),
                  optional(compressed),
                  tokens,
                  in,
                  out};
  at::Tensor y = result.view({tokens, out});
  by_way(choice_for(p), p, y);
  return result;
}

at::Tensor sparse24_compress_cuda(const at::Tensor& values, const at::Tensor& positions) {
  check_unpack24(values, positions);
  const c10::cuda::CUDAGuard guard(values.device());
  if (!sparse24_library::takes(values.scalar_type(), values.size(0), 2 * values.size(1), 1)) {
    return at::empty({0}, positions.options());
  }
  return sparse24_library::compress(unpack24_unchecked_cuda(aligned(values), aligned(positions)));
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) {
  m.impl("sparse24_linear", &sparse24_linear_cuda);
  m.impl("sparse24_compress", &sparse24_compress_cuda);
}

}  // namespace drot
