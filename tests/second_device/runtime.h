// What the parts of the test device share: its memory, its streams and its counter of host waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace second {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

// The current device and the current stream of a device, both of this thread. Stream 0 is the default one.
c10::DeviceIndex current_device();
int64_t current_stream(c10::DeviceIndex device);

// Whether `data` lies in pinned main memory.
bool is_pinned(const void* data);

// Tells the tests that the host waits for the device. It is an error while a graph is captured.
void host_waits(const char* why);

// Raises an error if this thread captures a graph, which is then lost.
void check_may_wait(const char* why);

// Whether this thread captures what it launches on the current stream of a device.
bool capturing(c10::DeviceIndex device);

// A CPU tensor in the memory of a tensor on the device.
at::Tensor host_view(const at::Tensor& tensor);

// Runs `op` on the CPU in the memory of `device`, and puts its results on the device.
void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device);

// The same, recorded in the graph that this thread captures.
void capture(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device);

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

inline bool writes(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

// Calls `visit` with the tensors of an argument: none, one, or those of a list.
template <typename Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) visit(*tensor);
  }
}

}  // namespace second
