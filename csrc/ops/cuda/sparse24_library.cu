#include "ops/cuda/sparse24_library.h"

#ifndef DROT_HAS_CUSPARSELT

namespace drot::sparse24_library {

bool takes(at::ScalarType, int64_t, int64_t, int64_t, const char** reason) {
  if (reason) *reason = "drot was built without cuSPARSELt";
  return false;
}
int version() { return 0; }
at::Tensor compress(const at::Tensor&) { TORCH_CHECK(false, "drot was built without cuSPARSELt"); }
LibraryAlgorithm search(const at::Tensor&, const at::Tensor&, int64_t) {
  TORCH_CHECK(false, "drot was built without cuSPARSELt");
}
void multiply(const at::Tensor&, const at::Tensor&, at::Tensor&, bool, const LibraryAlgorithm&) {
  TORCH_CHECK(false, "drot was built without cuSPARSELt");
}

}  // namespace drot::sparse24_library

#else

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cusparseLt.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#define DROT_CUSPARSELT_CHECK(call)                                                                   \
  do {                                                                                                \
    const cusparseStatus_t status = (call);                                                           \
    if (status != CUSPARSE_STATUS_SUCCESS) {                                                          \
      throw sparse24_library::Refused(                                                                \
          {__func__, __FILE__, __LINE__},                                                             \
          c10::str(#call, " failed with status ", static_cast<int>(status), " of cusparseStatus_t")); \
    }                                                                                                 \
  } while (false)

namespace drot::sparse24_library {
namespace {

constexpr uint32_t kAlignment = 16;  // bytes
constexpr int64_t kMultiple = 8;     // of tokens

// Everything below is made under this lock and lives as long as the process: it belongs to the CUDA
// contexts, which at exit may be gone before a destructor runs.
std::mutex& lock() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// The current device's handle, null where the library does not know the device.
const cusparseLtHandle_t* handle() {
  static auto* const handles = new std::map<int, std::unique_ptr<cusparseLtHandle_t> >;
  const int device = at::cuda::current_device();
  const auto found = handles->find(device);
  if (found != handles->end()) return found->second.get();
  auto made = std::make_unique<cusparseLtHandle_t>();
  if (cusparseLtInit(made.get()) != CUSPARSE_STATUS_SUCCESS) made.reset();
  return ((*handles)[device] = std::move(made)).get();
}

cudaDataType data_type(at::ScalarType dtype) { return dtype == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F; }

void describe_weight(cusparseLtMatDescriptor_t* weight, at::ScalarType dtype, int64_t out, int64_t in) {
  DROT_CUSPARSELT_CHECK(cusparseLtStructuredDescriptorInit(handle(), weight, out, in, in, kAlignment,
                                                           data_type(dtype), CUSPARSE_ORDER_ROW,
                                                           CUSPARSELT_SPARSITY_50_PERCENT));
}

// Bytes of a weight in the library's form, and of what it needs to make it.
std::pair<size_t, size_t> compressed_bytes(const cusparseLtMatDescriptor_t& weight) {
  size_t bytes = 0, scratch = 0;
  DROT_CUSPARSELT_CHECK(cusparseLtSpMMACompressedSize2(handle(), &weight, &bytes, &scratch));
  return {bytes, scratch};
}

struct Problem {
  int device;
  at::ScalarType dtype;
  int64_t out, in, tokens;
  LibraryAlgorithm algorithm;
  auto operator<=>(const Problem&) const = default;
};

// yᵀ [out, tokens] = W [out, in] xᵀ: the library's D in column order is y as PyTorch lays it out.
class Plan {
 public:
  explicit Plan(const Problem& p) : problem_(p) {
    const auto type = data_type(p.dtype);
    describe_weight(&weight_, p.dtype, p.out, p.in);
    DROT_CUSPARSELT_CHECK(cusparseLtDenseDescriptorInit(handle(), &x_, p.tokens, p.in, p.in, kAlignment, type,
                                                        CUSPARSE_ORDER_ROW));
    DROT_CUSPARSELT_CHECK(cusparseLtDenseDescriptorInit(handle(), &y_, p.out, p.tokens, p.out, kAlignment,
                                                        type, CUSPARSE_ORDER_COL));
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulDescriptorInit(
        handle(), &product_, CUSPARSE_OPERATION_NON_TRANSPOSE, CUSPARSE_OPERATION_TRANSPOSE, &weight_, &x_,
        &y_, &y_, CUSPARSE_COMPUTE_32F));
    DROT_CUSPARSELT_CHECK(
        cusparseLtMatmulAlgSelectionInit(handle(), &selection_, &product_, CUSPARSELT_MATMUL_ALG_DEFAULT));
    if (const LibraryAlgorithm& a = p.algorithm; a.id >= 0) {
      set(CUSPARSELT_MATMUL_ALG_CONFIG_ID, a.id);
      if (a.split >= 1) set(CUSPARSELT_MATMUL_SPLIT_K, a.split);  // below: the library's own way
      if (a.split > 1 && a.split_mode > 0) set(CUSPARSELT_MATMUL_SPLIT_K_MODE, a.split_mode);
      if (a.split > 1 && a.split_buffers > 0) set(CUSPARSELT_MATMUL_SPLIT_K_BUFFERS, a.split_buffers);
    }
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulPlanInit(handle(), &plan_, &product_, &selection_));
    compressed_bytes_ = static_cast<int64_t>(compressed_bytes(weight_).first);
  }
  Plan(const Plan&) = delete;  // the library keeps pointers between the members
  ~Plan() {
    cusparseLtMatmulPlanDestroy(&plan_);
#if CUSPARSELT_VERSION >= 800
    cusparseLtMatmulAlgSelectionDestroy(&selection_);
#endif
    for (const auto* matrix : {&weight_, &x_, &y_}) cusparseLtMatDescriptorDestroy(matrix);
  }

  void check(const at::Tensor& compressed) const {
    TORCH_CHECK_VALUE(compressed.numel() == compressed_bytes_, "compressed must hold ", compressed_bytes_,
                      " bytes, as sparse24_compress gives for this weight, got ", compressed.numel());
  }

  // Times every algorithm: this plan then has the fastest. It writes y, never a result that is wanted.
  LibraryAlgorithm search(const at::Tensor& compressed, const at::Tensor& x) {
    check(compressed);
    at::Tensor y = at::empty({problem_.tokens, problem_.out}, x.options());
    at::Tensor space = workspace(x);
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const float one = 1, zero = 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulSearch(handle(), &plan_, &one, compressed.const_data_ptr(),
                                                 x.const_data_ptr(), &zero, y.const_data_ptr(),
                                                 y.mutable_data_ptr(), space.mutable_data_ptr(), &stream, 1));
    LibraryAlgorithm found;
    get(CUSPARSELT_MATMUL_ALG_CONFIG_ID, &found.id);
    get(CUSPARSELT_MATMUL_SPLIT_K, &found.split);
    get(CUSPARSELT_MATMUL_SPLIT_K_MODE, &found.split_mode);
    get(CUSPARSELT_MATMUL_SPLIT_K_BUFFERS, &found.split_buffers);
    return found;
  }

  void multiply(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y, bool add) const {
    check(compressed);
    at::Tensor space = workspace(x);
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const float one = 1, beta = add ? 1 : 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmul(handle(), &plan_, &one, compressed.const_data_ptr(),
                                           x.const_data_ptr(), &beta, y.const_data_ptr(),
                                           y.mutable_data_ptr(), space.mutable_data_ptr(), &stream, 1));
  }

 private:
  void set(cusparseLtMatmulAlgAttribute_t attribute, int value) {
    DROT_CUSPARSELT_CHECK(
        cusparseLtMatmulAlgSetAttribute(handle(), &selection_, attribute, &value, sizeof(value)));
  }
  void get(cusparseLtMatmulAlgAttribute_t attribute, int* value) {
    DROT_CUSPARSELT_CHECK(
        cusparseLtMatmulAlgGetAttribute(handle(), &selection_, attribute, value, sizeof(*value)));
  }
  at::Tensor workspace(const at::Tensor& x) const {
    size_t bytes = 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulGetWorkspace(handle(), &plan_, &bytes));
    return at::empty({static_cast<int64_t>(bytes)}, x.options().dtype(at::kByte));
  }

  Problem problem_;
  int64_t compressed_bytes_;
  cusparseLtMatDescriptor_t weight_, x_, y_;
  cusparseLtMatmulDescriptor_t product_;
  cusparseLtMatmulAlgSelection_t selection_;
  cusparseLtMatmulPlan_t plan_;
};

const Plan& plan_of(const Problem& problem) {
  static auto* const plans = new std::map<Problem, std::unique_ptr<Plan> >;
  std::unique_ptr<Plan>& plan = (*plans)[problem];
  if (!plan) {
    // it may come during the capture of a CUDA graph, here or in another thread
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    try {
      plan = std::make_unique<Plan>(problem);
    } catch (const Refused& refused) {
      if (problem.algorithm.id < 0) throw;
      TORCH_WARN_ONCE("cuSPARSELt refuses an algorithm that it found once, its default is taken; delete ",
                      remembered_file(), " to search anew: ", refused.what());
      Problem plain = problem;
      plain.algorithm = {};
      plan = std::make_unique<Plan>(plain);
    }
  }
  return *plan;
}

Problem problem_of(const at::Tensor& x, int64_t out, const LibraryAlgorithm& algorithm) {
  return {at::cuda::current_device(), x.scalar_type(), out, x.size(1), x.size(0), algorithm};
}

// x with rows of zeros up to a number of tokens that the library takes.
at::Tensor padded(const at::Tensor& x) {
  const int64_t tokens = x.size(0), wide = (tokens + kMultiple - 1) / kMultiple * kMultiple;
  if (wide == tokens) return x;
  at::Tensor result = at::empty({wide, x.size(1)}, x.options());
  result.narrow(0, 0, tokens).copy_(x);
  result.narrow(0, tokens, wide - tokens).zero_();
  return result;
}

}  // namespace

bool takes(at::ScalarType dtype, int64_t out, int64_t in, int64_t tokens, const char** reason) {
  constexpr int64_t kMost = INT32_MAX;
  const char* why = nullptr;
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    why = "cuSPARSELt multiplies bf16 and fp16 only";
  } else if (out == 0 || in == 0 || out % 32 || in % 32) {
    why = "cuSPARSELt wants multiples of 32 rows and columns";
  } else if (in > kMost / out || tokens + kMultiple > kMost / std::max(in, out)) {
    why = "cuSPARSELt takes matrices of less than 2^31 elements";
  } else {
    const std::lock_guard<std::mutex> guard(lock());
    if (!handle()) why = "cuSPARSELt does not know this GPU";
  }
  if (reason) *reason = why;
  return !why;
}

int version() {
  const std::lock_guard<std::mutex> guard(lock());
  int found = 0;
  if (handle()) DROT_CUSPARSELT_CHECK(cusparseLtGetVersion(handle(), &found));
  return found;
}

at::Tensor compress(const at::Tensor& w) {
  const std::lock_guard<std::mutex> guard(lock());
  cusparseLtMatDescriptor_t weight;
  describe_weight(&weight, w.scalar_type(), w.size(0), w.size(1));
  const auto [bytes, scratch_bytes] = compressed_bytes(weight);
  const auto options = w.options().dtype(at::kByte);
  at::Tensor compressed = at::empty({static_cast<int64_t>(bytes)}, options);
  at::Tensor scratch = at::empty({static_cast<int64_t>(scratch_bytes)}, options);
  DROT_CUSPARSELT_CHECK(cusparseLtSpMMACompress2(
      handle(), &weight, 1, CUSPARSE_OPERATION_NON_TRANSPOSE, w.const_data_ptr(),
      compressed.mutable_data_ptr(), scratch.mutable_data_ptr(), at::cuda::getCurrentCUDAStream()));
  DROT_CUSPARSELT_CHECK(cusparseLtMatDescriptorDestroy(&weight));
  return compressed;
}

LibraryAlgorithm search(const at::Tensor& compressed, const at::Tensor& x, int64_t out) {
  const at::Tensor wide = padded(x);
  const std::lock_guard<std::mutex> guard(lock());
  return Plan(problem_of(wide, out, {})).search(compressed, wide);
}

void multiply(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y, bool add,
              const LibraryAlgorithm& algorithm) {
  const at::Tensor wide_x = padded(x);
  const bool same = wide_x.size(0) == y.size(0);
  at::Tensor wide_y = same ? y : at::empty({wide_x.size(0), y.size(1)}, y.options());
  if (add && !same) wide_y.narrow(0, 0, y.size(0)).copy_(y);
  {
    const std::lock_guard<std::mutex> guard(lock());
    plan_of(problem_of(wide_x, y.size(1), algorithm)).multiply(compressed, wide_x, wide_y, add);
  }
  if (!same) y.copy_(wide_y.narrow(0, 0, y.size(0)));
}

}  // namespace drot::sparse24_library

#endif
