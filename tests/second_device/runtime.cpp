// Memory, streams and events of the test device. Its memory is main memory, and work is done when it is asked
// for.
#include "runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace second {
namespace {

// ---- memory --------------------------------------------------------------------------------------------

struct Usage {
  size_t current = 0, peak = 0, limit = size_t(1) << 40;
};

std::mutex memory_lock;
std::array<Usage, DEVICES> usages;
std::map<const char*, size_t> pinned;  // start -> bytes

struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex device;
};

// NaN for every float dtype: whoever reads what nobody wrote, or what was freed, finds out.
void spoil(void* data, size_t bytes) { std::memset(data, 0xff, bytes); }

void* new_memory(size_t bytes) {
  void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  TORCH_CHECK(data != nullptr, "no main memory for ", bytes, " bytes");
  spoil(data, bytes);
  return data;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard lock(memory_lock);
    usages[block->device].current -= block->bytes;
  }
  spoil(block->data, block->bytes);
  std::free(block->data);
  delete block;
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(TYPE, device);
    if (bytes == 0) return {nullptr, where};
    {
      std::lock_guard lock(memory_lock);
      auto& usage = usages[device];
      TORCH_CHECK_WITH(OutOfMemoryError, bytes <= usage.limit && usage.current <= usage.limit - bytes,
                       "second:", int(device), " is out of memory: ", usage.current, " + ", bytes,
                       " bytes are more than its limit of ", usage.limit);
      usage.current += bytes;
      usage.peak = std::max(usage.peak, usage.current);
    }
    void* data = new_memory(bytes);
    return {data, new Block{data, bytes, device}, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

void free_pinned(void* data) {
  {
    std::lock_guard lock(memory_lock);
    pinned.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* data = new_memory(bytes);
    std::lock_guard lock(memory_lock);
    pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(TYPE, &device_memory);

// ---- devices, streams and events -----------------------------------------------------------------------

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<int64_t, DEVICES> streams_of_thread{};
std::atomic<int64_t> last_stream{0};

c10::DeviceIndex exchange(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < DEVICES, "second:", int(device), " does not exist");
  return std::exchange(device_of_thread, device);
}

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

// The device of `device`, which may stand for the current one.
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_of_thread;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override { return {TYPE, exchange(device.index())}; }
  c10::Device getDevice() const override { return {TYPE, device_of_thread}; }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), streams_of_thread[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(index_of(device), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device_index(),
                     std::exchange(streams_of_thread[stream.device_index()], stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { host_waits("synchronize a stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { host_waits("synchronize a device"); }

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { host_waits("synchronize an event"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Whether torch finds the devices. Between the tests of the device it does not.
std::atomic<bool> available{false};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return available ? DEVICES : 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange(device); }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? device_of_thread : exchange(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

int64_t current_stream(c10::DeviceIndex device) { return streams_of_thread[device]; }

bool is_pinned(const void* data) {
  std::lock_guard lock(memory_lock);
  const auto* byte = static_cast<const char*>(data);
  auto after = pinned.upper_bound(byte);
  return after != pinned.begin() && byte < (--after)->first + after->second;
}

void host_waits(const char* why) {
  check_may_wait(why);
  static const auto told = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("second::host_waits", "")
                               .typed<void(c10::string_view)>();
  told.call(why);
}

// ---- what the tests call -------------------------------------------------------------------------------

TORCH_LIBRARY(second, m) {
  m.def("host_waits(str why) -> ()");  // the tests implement it
  m.def("host_view(Tensor x) -> Tensor", &host_view);
  m.def("set_available(bool available) -> ()", [](bool now) { available = now; });
  m.def("is_available() -> bool", [] { return available.load(); });
  m.def("current_device() -> int", [] { return int64_t(device_of_thread); });
  m.def("set_device(int device) -> int", [](int64_t device) { return int64_t(exchange(device)); });
  m.def("allocated(int device) -> int", [](int64_t device) { return int64_t(usages.at(device).current); });
  m.def("peak(int device) -> int", [](int64_t device) { return int64_t(usages.at(device).peak); });
  m.def("reset_peak(int device) -> ()",
        [](int64_t device) { usages.at(device).peak = usages.at(device).current; });
  m.def("limit(int device) -> int", [](int64_t device) { return int64_t(usages.at(device).limit); });
  m.def("set_limit(int device, int bytes) -> ()",
        [](int64_t device, int64_t bytes) { usages.at(device).limit = size_t(bytes); });
}

}  // namespace second
