// The ops of the test device: every op is that of the CPU, on views of the device's memory. As on a GPU, the
// tensors of an op have to lie on one device, and some ops make the host wait.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime.h"

namespace second {

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != TYPE) return tensor;
  const auto& memory = tensor.storage();
  // an op may enlarge its result; the view then leaves the memory of the device
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                       c10::DataPtr(memory.mutable_data(), c10::Device(c10::kCPU)),
                       c10::GetAllocator(c10::kCPU), true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return view;
}

namespace {

at::Tensor to_device(const at::Tensor& of_host, c10::Device device) {
  auto result = at::empty_strided(of_host.sizes(), of_host.strides(), of_host.options().device(device));
  host_view(result).copy_(of_host);
  return result;
}

// ---- any op, on the CPU
// ------------------------------------------------------------------------------------

// The ops after which the host knows a size or a value, as on a GPU.
const std::set<std::string> READ_BY_HOST = {
    "aten::nonzero",  "aten::masked_select",     "aten::unique_consecutive",     "aten::_unique",
    "aten::_unique2", "aten::unique_dim",        "aten::unique_dim_consecutive", "aten::equal",
    "aten::bincount", "aten::repeat_interleave",
};
// The ops whose indices may lie on the CPU, and that make the host wait for a mask in the place of indices.
const std::set<std::string> INDEXED = {"aten::index", "aten::index_put", "aten::index_put_",
                                       "aten::_index_put_impl_", "aten::_unsafe_index"};

// The one device of the arguments. Raises an error, as a GPU does, where a second one is among them.
std::optional<c10::Device> common_device(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    for_tensors(argument, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      TORCH_CHECK(!device || *device == tensor.device(),
                  "Expected all tensors to be on the same device, but ", name,
                  " found at least two devices, ", *device, " and ", tensor.device(), "!");
      device = tensor.device();
    });
    if (!device && argument.isDevice() && argument.toDevice().type() == TYPE) {
      const auto wanted = argument.toDevice();
      device = wanted.has_index() ? wanted : c10::Device(TYPE, current_device());
    }
  }
  if (!device || INDEXED.count(name)) return device;
  for (const auto& argument : arguments)
    for_tensors(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.defined() || on_device(tensor) || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but ", name,
                  " found at least two devices, ", *device, " and ", tensor.device(), "!");
    });
  return device;
}

void count_waits(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  if (READ_BY_HOST.count(name)) host_waits(name.c_str());
  if (!INDEXED.count(name)) return;
  for_tensors(arguments[1], [&](const at::Tensor& index) {
    const auto type = index.defined() ? index.scalar_type() : at::kLong;
    if (type == at::kBool || type == at::kByte) host_waits("index by a mask");
  });
}

c10::IValue to_host(const c10::IValue& value) {
  if (value.isTensor()) return host_view(value.toTensor());
  if (value.isDevice() && value.toDevice().type() == TYPE) return c10::Device(c10::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> views;
    for (const at::Tensor& tensor : value.toTensorList()) views.push_back(host_view(tensor));
    return views;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> views;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      views.push_back(tensor ? std::optional(host_view(*tensor)) : std::nullopt);
    return views;
  }
  return value;
}

// Brings a result home that the op has enlarged or reshaped.
void bring_home(const at::Tensor& tensor, const at::Tensor& view) {
  const bool moved = tensor.numel() > 0 && view.data_ptr() != host_view(tensor).data_ptr();
  if (!moved && tensor.sizes() == view.sizes() && tensor.strides() == view.strides()) return;
  const auto values = view.clone();
  at::native::resize_(tensor, view.sizes(), std::nullopt);
  host_view(tensor).copy_(values);
}

}  // namespace

// Runs `op` on the CPU in the memory of `device`, and puts its results on the device.
void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = to_host((*stack)[i]);
  const std::vector<c10::IValue> views(stack->begin() + first, stack->end());

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (size_t i = 0; i < count; ++i)
    if (writes(schema.arguments()[i].alias_info()) && given[i].isTensor() && on_device(given[i].toTensor()))
      bring_home(given[i].toTensor(), views[i].toTensor());
  const size_t result = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[result + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (writes(alias)) {
      for (size_t j = 0; j < count; ++j) {
        const auto* argument = schema.arguments()[j].alias_info();
        if (argument != nullptr && *argument == *alias) value = given[j];
      }
      continue;
    }
    TORCH_CHECK(alias == nullptr, schema.name(),
                " returns a view: the test device needs a kernel of its own for it");
    if (value.isTensor() && value.toTensor().defined()) {
      value = to_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorList()) results.push_back(to_device(tensor, device));
      value = results;
    }
  }
}

namespace {

void any_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const size_t count = op.schema().arguments().size();
  const auto arguments = at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count);
  const auto device = common_device(name, arguments);
  TORCH_CHECK(device, name, " was called for the test device without a tensor on it");
  count_waits(name, arguments);
  const c10::DeviceGuard guard(*device);
  (capturing(device->index()) ? capture : launch)(op, stack, *device);
}

// ---- memory, views and copies --------------------------------------------------------------------------

at::Tensor empty_on(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device> device, std::optional<bool> pin_memory,
                    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only main memory can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(TYPE),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_on(c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only main memory can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(TYPE),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A launch on the device, so that a captured graph has it: the body of `copy_` within one device.
at::Tensor& copy_within(at::Tensor& to, const at::Tensor& from) { return to.copy_(from); }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.device() == to.device()) {
    static const auto within = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("second::copy_within_", "")
                                   .typed<at::Tensor&(at::Tensor&, const at::Tensor&)>();
    within.call(const_cast<at::Tensor&>(to), from);
    return to;
  }
  // between devices the host does not wait; a copy to or from pageable memory is never asynchronous
  const auto& of_host = on_device(from) ? to : from;
  const bool by_host = !on_device(of_host);
  if (by_host && !(non_blocking && is_pinned(of_host.const_data_ptr())))
    host_waits(on_device(from) ? "copy to the host" : "copy from the host");
  host_view(to).copy_(host_view(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar scalar_of(const at::Tensor& tensor) {
  host_waits("item");
  return at::native::_local_scalar_dense_cpu(host_view(tensor));
}

at::Tensor view_of(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_op>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_on);
  m.impl("empty_strided", empty_strided_on);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", scalar_of);
  m.impl("view", view_of);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_FRAGMENT(second, m) { m.def("copy_within_(Tensor(a!) to, Tensor from) -> Tensor(a!)"); }

TORCH_LIBRARY_IMPL(second, CPU, m) { m.impl("copy_within_", &copy_within); }

}  // namespace second
