#include "ops/cuda/sparse24_library.h"

#ifndef DROT_HAS_CUSPARSELT

namespace drot::sparse24_library {

bool takes(at::ScalarType, int64_t, int64_t, const char** reason) {
  if (reason) *reason = "drot was built without cuSPARSELt";
  return false;
}
at::Tensor compress(const at::Tensor&) { TORCH_CHECK(false, "drot was built without cuSPARSELt"); }
void multiply(const at::Tensor&, const at::Tensor&, at::Tensor&, bool) {
  TORCH_CHECK(false, "drot was built without cuSPARSELt");
}

}  // namespace drot::sparse24_library

#else

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cusparseLt.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#define DROT_CUSPARSELT_CHECK(call)                                                                          \
  do {                                                                                                       \
    const cusparseStatus_t status = (call);                                                                  \
    TORCH_CHECK(status == CUSPARSE_STATUS_SUCCESS, #call, " failed: ", cusparseLtGetErrorName(status), " (", \
                static_cast<int>(status), ")");                                                              \
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

struct Problem {
  int device;
  at::ScalarType dtype;
  int64_t out, in, tokens;
  auto key() const { return std::tie(device, dtype, out, in, tokens); }
  bool operator<(const Problem& other) const { return key() < other.key(); }
};

// What a search found.
struct Algorithm {
  int id = 0, split = 1, split_mode = 0, split_buffers = 0;
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
  }
  Plan(const Plan&) = delete;  // the library keeps pointers between the members

  // Before anything is multiplied.
  void choose(const Algorithm& chosen) {
    set(CUSPARSELT_MATMUL_ALG_CONFIG_ID, chosen.id);
    if (chosen.split != 1) set(CUSPARSELT_MATMUL_SPLIT_K, chosen.split);
    if (chosen.split_mode > 0) set(CUSPARSELT_MATMUL_SPLIT_K_MODE, chosen.split_mode);
    if (chosen.split_buffers > 0) set(CUSPARSELT_MATMUL_SPLIT_K_BUFFERS, chosen.split_buffers);
  }

  void finish() { DROT_CUSPARSELT_CHECK(cusparseLtMatmulPlanInit(handle(), &plan_, &product_, &selection_)); }

  // Times every algorithm and keeps the fastest. It writes y, and never to a result that is wanted.
  Algorithm search(const at::Tensor& compressed, const at::Tensor& x) {
    at::Tensor y = at::empty({problem_.tokens, problem_.out}, x.options());
    at::Tensor space = workspace(x);
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const float one = 1, zero = 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulSearch(handle(), &plan_, &one, compressed.const_data_ptr(),
                                                 x.const_data_ptr(), &zero, y.const_data_ptr(),
                                                 y.mutable_data_ptr(), space.mutable_data_ptr(), &stream, 1));
    Algorithm found;
    get(CUSPARSELT_MATMUL_ALG_CONFIG_ID, &found.id);
    get(CUSPARSELT_MATMUL_SPLIT_K, &found.split);
    get(CUSPARSELT_MATMUL_SPLIT_K_MODE, &found.split_mode);
    get(CUSPARSELT_MATMUL_SPLIT_K_BUFFERS, &found.split_buffers);
    return found;
  }

  void multiply(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y, bool add) const {
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
  cusparseLtMatDescriptor_t weight_, x_, y_;
  cusparseLtMatmulDescriptor_t product_;
  cusparseLtMatmulAlgSelection_t selection_;
  cusparseLtMatmulPlan_t plan_;
};

// The plan of a problem. An algorithm is searched once for all token numbers up to the same power of
// two, and not while a CUDA graph is captured.
const Plan& plan_of(const Problem& problem, const at::Tensor& compressed, const at::Tensor& x) {
  static auto* const plans = new std::map<Problem, std::unique_ptr<Plan> >;
  static auto* const algorithms = new std::map<Problem, Algorithm>;
  std::unique_ptr<Plan>& plan = (*plans)[problem];
  if (plan) return *plan;
  Problem alike = problem;
  for (alike.tokens = kMultiple; alike.tokens < problem.tokens; alike.tokens *= 2) {
  }
  auto made = std::make_unique<Plan>(problem);
  const auto known = algorithms->find(alike);
  if (known != algorithms->end()) made->choose(known->second);
  made->finish();
  const bool captured = at::cuda::currentStreamCaptureStatus() != at::cuda::CaptureStatus::None;
  if (known == algorithms->end() && !captured) (*algorithms)[alike] = made->search(compressed, x);
  plan = std::move(made);
  return *plan;
}

}  // namespace

bool takes(at::ScalarType dtype, int64_t out, int64_t in, const char** reason) {
  const char* why = nullptr;
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    why = "cuSPARSELt multiplies bf16 and fp16 only";
  } else if (out == 0 || in == 0 || out % 32 || in % 32) {
    why = "cuSPARSELt wants multiples of 32 rows and columns";
  } else {
    const std::lock_guard<std::mutex> guard(lock());
    if (!handle()) why = "cuSPARSELt does not know this GPU";
  }
  if (reason) *reason = why;
  return !why;
}

at::Tensor compress(const at::Tensor& w) {
  const std::lock_guard<std::mutex> guard(lock());
  cusparseLtMatDescriptor_t weight;
  describe_weight(&weight, w.scalar_type(), w.size(0), w.size(1));
  size_t bytes = 0, scratch_bytes = 0;
  DROT_CUSPARSELT_CHECK(cusparseLtSpMMACompressedSize2(handle(), &weight, &bytes, &scratch_bytes));
  const auto options = w.options().dtype(at::kByte);
  at::Tensor compressed = at::empty({static_cast<int64_t>(bytes)}, options);
  at::Tensor scratch = at::empty({static_cast<int64_t>(scratch_bytes)}, options);
  DROT_CUSPARSELT_CHECK(cusparseLtSpMMACompress2(
      handle(), &weight, 1, CUSPARSE_OPERATION_NON_TRANSPOSE, w.const_data_ptr(),
      compressed.mutable_data_ptr(), scratch.mutable_data_ptr(), at::cuda::getCurrentCUDAStream()));
  DROT_CUSPARSELT_CHECK(cusparseLtMatDescriptorDestroy(&weight));
  return compressed;
}

void multiply(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y, bool add) {
  const int64_t tokens = x.size(0), padded = (tokens + kMultiple - 1) / kMultiple * kMultiple;
  at::Tensor wide_x = x, wide_y = y;
  if (padded != tokens) {
    wide_x = at::empty({padded, x.size(1)}, x.options());
    wide_x.narrow(0, 0, tokens).copy_(x);
    wide_x.narrow(0, tokens, padded - tokens).zero_();
    wide_y = at::empty({padded, y.size(1)}, y.options());
    if (add) wide_y.narrow(0, 0, tokens).copy_(y);
  }
  {
    const std::lock_guard<std::mutex> guard(lock());
    const Problem problem{at::cuda::current_device(), x.scalar_type(), y.size(1), x.size(1), padded};
    plan_of(problem, compressed, wide_x).multiply(compressed, wide_x, wide_y, add);
  }
  if (padded != tokens) y.copy_(wide_y.narrow(0, 0, tokens));
}

}  // namespace drot::sparse24_library

#endif
