// The graphs of the test device: they record what is launched on one stream, and launch it again.
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace second {
namespace {

// A launch with its arguments and its results, which a replay writes again.
struct Launch {
  c10::OperatorHandle op;
  c10::Device device;
  torch::jit::Stack arguments, results;
};

struct Graph {
  c10::DeviceIndex device;
  int64_t stream;
  bool invalid = false;
  std::vector<Launch> launches;
  std::vector<std::pair<at::Tensor, at::Tensor>> before;  // what a launch changes, and what it held
};

thread_local std::unique_ptr<Graph> captured;
std::mutex graphs_lock;
std::vector<std::shared_ptr<Graph>> graphs;

void begin_capture() {
  TORCH_CHECK(!captured, "this thread captures a graph already");
  const auto device = current_device();
  captured = std::make_unique<Graph>(Graph{device, current_stream(device)});
}

// Ends the capture, which leaves the device as it was. Returns the number of the graph.
int64_t end_capture() {
  std::shared_ptr<Graph> graph = std::move(captured);
  for (auto pair = graph->before.rbegin(); pair != graph->before.rend(); ++pair)
    if (pair->second.numel() > 0)  // nothing was in a result that the op has enlarged
      host_view(pair->first).copy_(pair->second);
  graph->before.clear();
  TORCH_CHECK(!graph->invalid, "operation failed due to a previous error during capture");
  std::lock_guard lock(graphs_lock);
  graphs.push_back(std::move(graph));
  return int64_t(graphs.size()) - 1;
}

void replay(int64_t number) {
  std::shared_ptr<Graph> graph;
  {
    std::lock_guard lock(graphs_lock);
    graph = graphs.at(number);
  }
  for (const auto& launched : graph->launches) {
    auto stack = launched.arguments;
    const c10::DeviceGuard guard(launched.device);
    launch(launched.op, &stack, launched.device);
    for (size_t i = 0; i < stack.size(); ++i)
      if (stack[i].isTensor() && on_device(stack[i].toTensor()))
        host_view(launched.results[i].toTensor()).copy_(host_view(stack[i].toTensor()));
  }
}

void drop_graph(int64_t number) {
  std::lock_guard lock(graphs_lock);
  graphs.at(number).reset();
}

}  // namespace

bool capturing(c10::DeviceIndex device) {
  return captured && captured->device == device && captured->stream == current_stream(device);
}

void check_may_wait(const char* why) {
  if (!captured) return;
  captured->invalid = true;
  TORCH_CHECK(false, "operation not permitted when stream is capturing: ", why);
}

void capture(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  const size_t count = op.schema().arguments().size();
  Launch launched{op, device, torch::jit::Stack(stack->end() - count, stack->end()), {}};
  for (size_t i = 0; i < count; ++i)
    if (writes(op.schema().arguments()[i].alias_info()))
      for_tensors(launched.arguments[i], [](const at::Tensor& tensor) {
        if (on_device(tensor)) captured->before.emplace_back(tensor, host_view(tensor).clone());
      });
  launch(op, stack, device);
  launched.results.assign(stack->end() - op.schema().returns().size(), stack->end());
  captured->launches.push_back(std::move(launched));
}

TORCH_LIBRARY_FRAGMENT(second, m) {
  m.def("begin_capture() -> ()", &begin_capture);
  m.def("end_capture() -> int", &end_capture);
  m.def("replay(int graph) -> ()", &replay);
  m.def("drop_graph(int graph) -> ()", &drop_graph);
}

}  // namespace second
