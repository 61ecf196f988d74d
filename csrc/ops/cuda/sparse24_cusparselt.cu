// 2:4 products by cuSPARSELt (sparse24_cusparselt.h): descriptors, plans and calls.
#include "ops/cuda/sparse24_cusparselt.h"

#ifndef DROT_HAS_CUSPARSELT

namespace drot::cusparselt {

constexpr const char* kNotBuilt = "drot was built without cuSPARSELt";

bool supports(at::ScalarType, int64_t, int64_t, int64_t, const char** reason) {
  if (reason) *reason = kNotBuilt;
  return false;
}
int version() { return 0; }
at::Tensor compress(const at::Tensor&) { TORCH_CHECK(false, kNotBuilt); }
CusparseltConfig search_config(const at::Tensor&, const at::Tensor&, int64_t) {
  TORCH_CHECK(false, kNotBuilt);
}
void matmul(const at::Tensor&, const at::Tensor&, at::Tensor&, const CusparseltConfig&) {
  TORCH_CHECK(false, kNotBuilt);
}

}  // namespace drot::cusparselt

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

#include "common/lru_cache.h"

#define DROT_CUSPARSELT_CHECK(call)                                                                         \
  do {                                                                                                      \
    const cusparseStatus_t status = (call);                                                                 \
    if (status != CUSPARSE_STATUS_SUCCESS) {                                                                \
      throw cusparselt::Error({__func__, __FILE__, __LINE__},                                               \
                              c10::str(#call, " returned ", cusparseLtGetErrorName(status), " (",           \
                                       static_cast<int>(status), "): ", cusparseLtGetErrorString(status))); \
    }                                                                                                       \
  } while (false)

namespace drot::cusparselt {
namespace {

constexpr uint32_t kAlignment = 16;  // bytes

// Guards the handles and the plans. They are never destroyed: at exit their CUDA context may be gone before a
// destructor runs.
std::mutex& mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// The handle of the current device; null if cuSPARSELt does not support the device.
const cusparseLtHandle_t* handle() {
  static auto* const handles = new std::map<int, std::unique_ptr<cusparseLtHandle_t> >;
  const int device = at::cuda::current_device();
  const auto known = handles->find(device);
  if (known != handles->end()) return known->second.get();
  auto made = std::make_unique<cusparseLtHandle_t>();
  if (cusparseLtInit(made.get()) != CUSPARSE_STATUS_SUCCESS) made.reset();
  return ((*handles)[device] = std::move(made)).get();
}

// Owns one of cuSPARSELt's structs. It cannot be moved, because cuSPARSELt keeps pointers from one struct to
// another.
template <class T, auto kDestroy>
class Owned {
 public:
  // init(T*) throws if cuSPARSELt fails; then there is nothing to destroy.
  template <class Init>
  explicit Owned(Init init) {
    init(&value_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { kDestroy(&value_); }

  T* get() { return &value_; }
  const T* get() const { return &value_; }

 private:
  T value_;
};

// For structs that cuSPARSELt has no function to destroy.
template <class T>
void no_destroy(const T*) {}

using MatrixDescriptor = Owned<cusparseLtMatDescriptor_t, cusparseLtMatDescriptorDestroy>;
using MatmulDescriptor = Owned<cusparseLtMatmulDescriptor_t, no_destroy<cusparseLtMatmulDescriptor_t> >;
#if CUSPARSELT_VERSION >= 800
using AlgorithmSelection = Owned<cusparseLtMatmulAlgSelection_t, cusparseLtMatmulAlgSelectionDestroy>;
#else
using AlgorithmSelection = Owned<cusparseLtMatmulAlgSelection_t, no_destroy<cusparseLtMatmulAlgSelection_t> >;
#endif
using MatmulPlan = Owned<cusparseLtMatmulPlan_t, cusparseLtMatmulPlanDestroy>;

struct Matrix {
  at::ScalarType dtype;
  int64_t rows, columns;
  cusparseOrder_t order;

  int64_t leading_dimension() const { return order == CUSPARSE_ORDER_ROW ? columns : rows; }
  cudaDataType value_type() const { return dtype == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F; }
};

MatrixDescriptor describe_dense(const Matrix& m) {
  return MatrixDescriptor([&](cusparseLtMatDescriptor_t* descriptor) {
    DROT_CUSPARSELT_CHECK(cusparseLtDenseDescriptorInit(
        handle(), descriptor, m.rows, m.columns, m.leading_dimension(), kAlignment, m.value_type(), m.order));
  });
}

MatrixDescriptor describe_weight(at::ScalarType dtype, int64_t out, int64_t in) {
  const Matrix m{.dtype = dtype, .rows = out, .columns = in, .order = CUSPARSE_ORDER_ROW};
  return MatrixDescriptor([&](cusparseLtMatDescriptor_t* descriptor) {
    DROT_CUSPARSELT_CHECK(cusparseLtStructuredDescriptorInit(
        handle(), descriptor, m.rows, m.columns, m.leading_dimension(), kAlignment, m.value_type(), m.order,
        CUSPARSELT_SPARSITY_50_PERCENT));
  });
}

struct CompressedSize {
  size_t bytes = 0;    // size of the compressed weight
  size_t scratch = 0;  // bytes of workspace that the compression needs
};

CompressedSize compressed_size(const MatrixDescriptor& weight) {
  CompressedSize size;
  DROT_CUSPARSELT_CHECK(cusparseLtSpMMACompressedSize2(handle(), weight.get(), /*compressedSize=*/&size.bytes,
                                                       /*compressedBufferSize=*/&size.scratch));
  return size;
}

struct PlanKey {
  int device;
  at::ScalarType dtype;
  int64_t out, in, tokens;
  CusparseltConfig config;
  auto operator<=>(const PlanKey&) const = default;
};

// The plan of y = x Wᵀ. cuSPARSELt computes
//
//   D = alpha · op(A) op(B) + beta · C
//   A = W [out, in]            in row order, sparse; op(A) = A
//   B = x [tokens, in]         in row order; op(B) = Bᵀ
//   C = D = yᵀ [out, tokens]   in column order
//
// The operands are swapped, yᵀ = W xᵀ, so that the weight is A, the operand for which it was compressed. yᵀ
// in column order is y in row order: nothing is transposed in memory.
class Plan {
 public:
  explicit Plan(const PlanKey& key)
      : key_(key),
        weight_(describe_weight(key.dtype, key.out, key.in)),
        x_(describe_dense(
            {.dtype = key.dtype, .rows = key.tokens, .columns = key.in, .order = CUSPARSE_ORDER_ROW})),
        y_(describe_dense(
            {.dtype = key.dtype, .rows = key.out, .columns = key.tokens, .order = CUSPARSE_ORDER_COL})),
        product_([&](cusparseLtMatmulDescriptor_t* product) {
          DROT_CUSPARSELT_CHECK(
              cusparseLtMatmulDescriptorInit(handle(), product, /*opA=*/CUSPARSE_OPERATION_NON_TRANSPOSE,
                                             /*opB=*/CUSPARSE_OPERATION_TRANSPOSE,
                                             /*matA=*/weight_.get(), /*matB=*/x_.get(), /*matC=*/y_.get(),
                                             /*matD=*/y_.get(), CUSPARSE_COMPUTE_32F));
        }),
        selection_([&](cusparseLtMatmulAlgSelection_t* selection) {
          DROT_CUSPARSELT_CHECK(cusparseLtMatmulAlgSelectionInit(handle(), selection, product_.get(),
                                                                 CUSPARSELT_MATMUL_ALG_DEFAULT));
          select(selection, key.config);
        }),
        plan_([&](cusparseLtMatmulPlan_t* plan) {
          DROT_CUSPARSELT_CHECK(cusparseLtMatmulPlanInit(handle(), plan, product_.get(), selection_.get()));
        }),
        compressed_bytes_(static_cast<int64_t>(compressed_size(weight_).bytes)) {}

  // Times all configs and returns the fastest, which this plan then has. y is not a result.
  CusparseltConfig search(const at::Tensor& compressed, const at::Tensor& x) {
    check(compressed);
    at::Tensor y = at::empty({key_.tokens, key_.out}, x.options());
    at::Tensor workspace = allocate_workspace(x);
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const float alpha = 1, beta = 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulSearch(
        handle(), plan_.get(), &alpha, /*d_A=*/compressed.const_data_ptr(), /*d_B=*/x.const_data_ptr(), &beta,
        /*d_C=*/y.const_data_ptr(), /*d_D=*/y.mutable_data_ptr(), workspace.mutable_data_ptr(),
        /*streams=*/&stream, /*numStreams=*/1));
    return {.id = get(CUSPARSELT_MATMUL_ALG_CONFIG_ID),
            .split_k = get(CUSPARSELT_MATMUL_SPLIT_K),
            .split_k_mode = get(CUSPARSELT_MATMUL_SPLIT_K_MODE),
            .split_k_buffers = get(CUSPARSELT_MATMUL_SPLIT_K_BUFFERS)};
  }

  void matmul(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y) const {
    check(compressed);
    at::Tensor workspace = allocate_workspace(x);
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const float alpha = 1, beta = 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmul(
        handle(), plan_.get(), &alpha, /*d_A=*/compressed.const_data_ptr(), /*d_B=*/x.const_data_ptr(), &beta,
        /*d_C=*/y.const_data_ptr(), /*d_D=*/y.mutable_data_ptr(), workspace.mutable_data_ptr(),
        /*streams=*/&stream, /*numStreams=*/1));
  }

 private:
  void check(const at::Tensor& compressed) const {
    TORCH_CHECK_VALUE(compressed.numel() == compressed_bytes_, "compressed must hold ", compressed_bytes_,
                      " bytes, as sparse24_compress returns for this weight, got ", compressed.numel());
  }

  static void select(cusparseLtMatmulAlgSelection_t* selection, const CusparseltConfig& config) {
    if (config.id < 0) return;
    const auto set = [&](cusparseLtMatmulAlgAttribute_t attribute, int value) {
      DROT_CUSPARSELT_CHECK(
          cusparseLtMatmulAlgSetAttribute(handle(), selection, attribute, &value, sizeof(value)));
    };
    set(CUSPARSELT_MATMUL_ALG_CONFIG_ID, config.id);
    if (config.split_k >= 1) set(CUSPARSELT_MATMUL_SPLIT_K, config.split_k);  // < 1: cuSPARSELt chooses
    if (config.split_k <= 1) return;
    if (config.split_k_mode > 0) set(CUSPARSELT_MATMUL_SPLIT_K_MODE, config.split_k_mode);
    if (config.split_k_buffers > 0) set(CUSPARSELT_MATMUL_SPLIT_K_BUFFERS, config.split_k_buffers);
  }

  int get(cusparseLtMatmulAlgAttribute_t attribute) const {
    int value = 0;
    DROT_CUSPARSELT_CHECK(
        cusparseLtMatmulAlgGetAttribute(handle(), selection_.get(), attribute, &value, sizeof(value)));
    return value;
  }

  at::Tensor allocate_workspace(const at::Tensor& x) const {
    size_t bytes = 0;
    DROT_CUSPARSELT_CHECK(cusparseLtMatmulGetWorkspace(handle(), plan_.get(), &bytes));
    return at::empty({static_cast<int64_t>(bytes)}, x.options().dtype(at::kByte));
  }

  // in the order in which they are made; they are destroyed in the reverse order
  PlanKey key_;
  MatrixDescriptor weight_, x_, y_;
  MatmulDescriptor product_;
  AlgorithmSelection selection_;
  MatmulPlan plan_;
  int64_t compressed_bytes_;
};

// Most plans that are kept. A model has about ten shapes of weights; each of them needs a plan for each
// number that planned_tokens returns.
constexpr size_t kMostPlans = 512;

const Plan& plan_for(const PlanKey& key) {
  static auto* const plans = new LruCache<PlanKey, std::unique_ptr<Plan> >(kMostPlans);
  return *plans->get(key, [&] {
    // a CUDA graph may be captured meanwhile, in this thread or in another
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    try {
      return std::make_unique<Plan>(key);
    } catch (const Error& error) {
      if (key.config.id < 0) throw;
      TORCH_WARN_ONCE("cuSPARSELt rejects a config from the tuning cache; drot uses its default. Delete ",
                      tuning_cache::file(), " to search again. ", error.what());
      PlanKey with_default = key;
      with_default.config = {};
      return std::make_unique<Plan>(with_default);
    }
  });
}

PlanKey plan_key(const at::Tensor& x, int64_t out, const CusparseltConfig& config) {
  return {.device = at::cuda::current_device(),
          .dtype = x.scalar_type(),
          .out = out,
          .in = x.size(1),
          .tokens = x.size(0),
          .config = config};
}

// x, with rows of zeros up to planned_tokens.
at::Tensor pad_tokens(const at::Tensor& x) {
  const int64_t tokens = x.size(0), padded = planned_tokens(tokens);
  if (padded == tokens) return x;
  at::Tensor result = at::empty({padded, x.size(1)}, x.options());
  result.narrow(0, 0, tokens).copy_(x);
  result.narrow(0, tokens, padded - tokens).zero_();
  return result;
}

}  // namespace

bool supports(at::ScalarType dtype, int64_t out, int64_t in, int64_t tokens, const char** reason) {
  constexpr int64_t kMost = INT32_MAX;
  const char* why = nullptr;
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    why = "drot uses cuSPARSELt for bf16 and fp16 only";
  } else if (out == 0 || in == 0 || out % 32 || in % 32) {
    why = "cuSPARSELt needs multiples of 32 rows and columns";
  } else if (in > kMost / out || planned_tokens(tokens) > kMost / std::max(in, out)) {
    why = "drot uses cuSPARSELt for matrices of less than 2^31 elements only";
  } else {
    const std::lock_guard<std::mutex> guard(mutex());
    if (!handle()) why = "cuSPARSELt does not support this GPU";
  }
  if (reason) *reason = why;
  return !why;
}

int version() {
  const std::lock_guard<std::mutex> guard(mutex());
  int found = 0;
  if (handle()) DROT_CUSPARSELT_CHECK(cusparseLtGetVersion(handle(), &found));
  return found;
}

at::Tensor compress(const at::Tensor& w) {
  const std::lock_guard<std::mutex> guard(mutex());
  const MatrixDescriptor weight = describe_weight(w.scalar_type(), w.size(0), w.size(1));
  const CompressedSize size = compressed_size(weight);
  const auto byte_options = w.options().dtype(at::kByte);
  at::Tensor compressed = at::empty({static_cast<int64_t>(size.bytes)}, byte_options);
  at::Tensor scratch = at::empty({static_cast<int64_t>(size.scratch)}, byte_options);
  DROT_CUSPARSELT_CHECK(cusparseLtSpMMACompress2(
      handle(), weight.get(), /*isSparseA=*/1, CUSPARSE_OPERATION_NON_TRANSPOSE,
      /*d_dense=*/w.const_data_ptr(), /*d_compressed=*/compressed.mutable_data_ptr(),
      /*d_compressed_buffer=*/scratch.mutable_data_ptr(), at::cuda::getCurrentCUDAStream()));
  return compressed;
}

CusparseltConfig search_config(const at::Tensor& compressed, const at::Tensor& x, int64_t out) {
  // cuSPARSELt 0.8.0 tries a kernel that ends in an illegal instruction on an H200, after which the process
  // can use the GPU no more: 40 to 100 tokens and weights of 64 x 256 and 96 x 256 in fp16
  if (x.scalar_type() == at::kHalf) return {};
  const at::Tensor padded_x = pad_tokens(x);
  const std::lock_guard<std::mutex> guard(mutex());
  return Plan(plan_key(padded_x, out, /*config=*/{})).search(compressed, padded_x);
}

void matmul(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y,
            const CusparseltConfig& config) {
  const int64_t tokens = y.size(0), out = y.size(1);
  const at::Tensor padded_x = pad_tokens(x);
  const bool padded = padded_x.size(0) != tokens;
  at::Tensor padded_y = padded ? at::empty({padded_x.size(0), out}, y.options()) : y;
  {
    const std::lock_guard<std::mutex> guard(mutex());
    plan_for(plan_key(padded_x, out, config)).matmul(compressed, padded_x, padded_y);
  }
  if (padded) y.copy_(padded_y.narrow(0, 0, tokens));
}

}  // namespace drot::cusparselt

#endif
