// "fakegpu": a simulated accelerator for tests, as a PrivateUse1 backend of torch.
//
// Memory. One sparse file in memory is mapped twice. Tensors point into a mapping without access
// rights, so host access through data_ptr() is a SIGSEGV at any time, in any thread. Kernels use
// the other mapping.
//
// Time. A copy with non_blocking=True between pinned memory and the device waits in the queue of
// its stream until a kernel of the stream, an event or a synchronization needs it. CUDA permits no
// later moment. A missing synchronization therefore gives wrong values in every run. Kernels run
// when they are called, after the copies in the queue of their stream (not of other streams).
//
// Operators. The device has every operator of the CPU, which runs on aliases of the memory. It
// refuses tensors of several devices with CUDA's message.
//
// Not simulated: kernels that run late, graphs, memory shared between processes, fused recurrent
// kernels, and reuse of freed memory that another stream still reads (record_stream).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace fakegpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kMemoryBytes = size_t(16) << 30, kAlign = 512, kPage = size_t(1) << 20;
const c10::Device kDevice(kType, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::map<std::string, int64_t> counts;
py::object* wait_hook = nullptr;  // called with the reason of each wait
bool is_lost = false;             // every use fails, as after an error of a driver

void count_wait(const std::string& reason) {
  ++counts["waits"];
  if (wait_hook) {
    py::gil_scoped_acquire gil;
    (*wait_hook)(reason);
  }
}

// --- memory --------------------------------------------------------------------------------------

class Memory final : public c10::Allocator {
 public:
  bool begun() const { return host_; }
  bool forked() const { return begun() && owner_ != getpid(); }

  void begin() {  // on first use, as CUDA initializes a process
    TORCH_CHECK(!is_lost, "fakegpu error: the device is lost");
    if (!begun()) {
      int file = memfd_create("fakegpu", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, kMemoryBytes) == 0, "fakegpu: no memory file");
      auto map = [file](int access) {
        int flags = MAP_SHARED | MAP_NORESERVE;
        void* found = mmap(nullptr, kMemoryBytes, access, flags, file, 0);
        TORCH_CHECK(found != MAP_FAILED, "fakegpu: no address space");
        return static_cast<char*>(found);
      };
      device_ = map(PROT_READ | PROT_WRITE), host_ = map(PROT_NONE);
      close(file);
      owner_ = getpid(), free_[0] = kMemoryBytes;
    }
    TORCH_CHECK(!forked(), "Cannot re-initialize fakegpu in forked subprocess. To use fakegpu "
                           "with multiprocessing, you must use the 'spawn' start method");
  }

  // The address that kernels use for a tensor's address.
  char* for_kernels(const void* at) const {
    return device_ + (static_cast<const char*>(at) - host_);
  }
  bool is_for_kernels(const void* at) const {
    return begun() && at >= device_ && at < device_ + kMemoryBytes;
  }

  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    begin();
    if (!bytes) return {nullptr, nullptr, &release, kDevice};
    counts["allocated_bytes"] += bytes;
    void* at = take((bytes + kAlign - 1) / kAlign * kAlign);
    return {at, at, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(for_kernels(to), for_kernels(from), bytes);
  }

 private:
  void* take(size_t bytes) {
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      auto [offset, size] = *block;
      if (size < bytes) continue;
      free_.erase(block);
      if (size > bytes) free_[offset + bytes] = size - bytes;
      used_[offset] = bytes;
      memset(device_ + offset, 0xA5, std::min(bytes, kPage));  // fresh memory holds no zeros
      return host_ + offset;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "fakegpu: out of memory");
  }

  void give_back(size_t offset) {
    size_t size = used_.at(offset);
    used_.erase(offset);
    if (size >= kPage) madvise(device_ + offset, size, MADV_REMOVE);
    auto block = free_.emplace(offset, size).first;
    auto after = std::next(block);
    if (after != free_.end() && offset + size == after->first) {
      block->second += after->second;
      free_.erase(after);
    }
    if (block == free_.begin()) return;
    auto before = std::prev(block);
    if (before->first + before->second == offset) {
      before->second += block->second;
      free_.erase(block);
    }
  }

  static void release(void* at);

  char *host_ = nullptr, *device_ = nullptr;
  pid_t owner_ = 0;
  std::map<size_t, size_t> free_;  // offset: bytes
  std::unordered_map<size_t, size_t> used_;
} memory;

void Memory::release(void* at) {
  Lock lock(mutex);
  if (at && !memory.forked()) memory.give_back(static_cast<char*>(at) - memory.host_);
}

struct PinnedMemory final : c10::Allocator {
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool has(const void* pointer) const {
    Lock lock(mutex);
    auto at = static_cast<const char*>(pointer);
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return false;
    auto [first, bytes] = *std::prev(after);
    return at < first + bytes;
  }
} pinned_memory;

void release_pinned(void* at) {
  Lock lock(mutex);
  pinned_memory.blocks.erase(static_cast<char*>(at));
  free(at);
}

c10::DataPtr PinnedMemory::allocate(size_t bytes) {
  Lock lock(mutex);
  size_t size = (bytes / 64 + 1) * 64;
  void* at = aligned_alloc(64, size);
  blocks[static_cast<char*>(at)] = size;
  ++counts["pinned_allocations"];
  return {at, at, &release_pinned, c10::Device(c10::kCPU)};
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const { return &release_pinned; }

// --- streams and events --------------------------------------------------------------------------

struct Stream {
  std::deque<std::function<void()>> waiting;
  uint64_t done = 0;

  uint64_t issued() const { return done + waiting.size(); }
  void run(uint64_t until) {
    while (done < until && !waiting.empty()) {
      auto task = std::move(waiting.front());
      waiting.pop_front();
      ++done;
      task();
    }
  }
  void run() { run(issued()); }
};

std::deque<Stream> streams(1);
thread_local c10::StreamId current_stream = 0;

Stream& current() { return streams[current_stream]; }

void run_all() {
  for (auto& stream : streams) stream.run();
}

struct Event {
  c10::StreamId stream;
  uint64_t issued;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    Lock lock(mutex);
    streams.emplace_back();
    return stream(streams.size() - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex,
              c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {on.id(), streams[on.id()].issued()};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& on) const override {
    Lock lock(mutex);
    if (!event) return;
    auto recorded = *static_cast<Event*>(event);
    streams[on.id()].waiting.push_back([recorded] { streams[recorded.stream].run(recorded.issued); });
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    auto recorded = static_cast<Event*>(event);
    return !recorded || streams[recorded->stream].done >= recorded->issued;
  }
  bool queryStream(const c10::Stream& one) const override {
    Lock lock(mutex);
    return streams[one.id()].waiting.empty();
  }
  void synchronizeStream(const c10::Stream& one) const override {
    Lock lock(mutex);
    count_wait("synchronize a stream");
    streams[one.id()].run();
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    count_wait("synchronize an event");
    if (auto recorded = static_cast<Event*>(event)) streams[recorded->stream].run(recorded->issued);
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Lock lock(mutex);
    count_wait("synchronize");
    run_all();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- generators ----------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Generator(at::Generator of_cpu) : GeneratorImpl(kDevice, kKeys), inner(of_cpu) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "fakegpu: generators have no offset"); }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "fakegpu: generators have no offset");
  }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.set_state(at::Tensor(state.shallow_copy_and_detach(c10::VariableVersion(0), true)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.get_state().getIntrusivePtr();
  }
  Generator* clone_impl() const override { return new Generator(inner.clone()); }
  static c10::DeviceType device_type() { return kType; }
};

at::Generator new_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator());
}

const at::Generator& default_generator() {
  static auto made = new_generator();
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return memory.begun(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* at) const override { return pinned_memory.has(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
};

// --- making, viewing and copying tensors ---------------------------------------------------------

bool on_device(const at::Tensor& one) { return one.defined() && one.device().type() == kType; }

// Return an alias on the CPU, through which kernels read and write.
at::Tensor alias_of(const at::Tensor& one) {
  auto options = one.options().device(at::kCPU);
  if (!one.storage().data()) return at::empty(one.sizes(), options);
  char* at = memory.for_kernels(one.storage().data()) + one.storage_offset() * one.itemsize();
  auto alias = at::from_blob(at, one.sizes(), one.strides(), options);
  if (one.is_conj()) alias._set_conj(true);
  if (one.is_neg()) alias._set_neg(true);
  return alias;
}

void require_unpinned(std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool> pinned) {
  require_unpinned(pinned);
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys,
                                           at::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat> format) {
  require_unpinned(pinned);
  return at::detail::empty_generic(sizes, &memory, kKeys, at::dtype_or_default(dtype), format);
}

// Return a new tensor of the device with the values of a tensor of the CPU.
at::Tensor new_tensor(const at::Tensor& values) {
  auto made = empty_strided(values.sizes(), values.strides(), values.scalar_type(), {}, {}, {});
  if (values.numel()) alias_of(made).copy_(values);
  return made;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes,
                          std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes =
      at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    auto larger = memory.allocate(bytes);
    if (storage->nbytes()) memory.copy_data(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

// Overwrite the target of a copy that has not run yet.
void spoil(const at::Tensor& target) {
  if (at::isFloatingType(target.scalar_type())) target.fill_(NAN);
  else if (target.scalar_type() != at::kBool) target.fill_(90);
}

void defer(std::function<void()> task) {
  current().waiting.push_back(std::move(task));
  if (current().waiting.size() > 1024) current().run();
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  Lock lock(mutex);
  memory.begin();
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  bool to_device = on_device(to);
  if (to_device && on_device(from)) {
    ++counts["kernels"];
    current().run();
    alias_of(to).copy_(alias_of(from));
    return to;
  }
  const auto& host = to_device ? from : to;
  bool pinned = host.has_storage() && pinned_memory.has(host.storage().data());
  std::string direction = to_device ? "h2d" : "d2h";
  ++counts[direction + (pinned ? "_pinned" : "_pageable") + (non_blocking ? "_async" : "")];
  counts[direction + "_bytes"] += to.nbytes();
  if (non_blocking && to_device) {
    auto source = pinned ? from : from.clone();  // a driver stages pageable memory at once
    defer([to, source] { alias_of(to).copy_(source); });
  } else if (non_blocking && pinned) {
    spoil(to);
    defer([target = to, from]() mutable { target.copy_(alias_of(from)); });
  } else {
    count_wait(to_device ? "copy to the device" : "copy to the host");
    current().run();
    if (to_device) alias_of(to).copy_(from);
    else to.copy_(alias_of(from));
  }
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  Lock lock(mutex);
  memory.begin();
  count_wait("item()");
  ++counts["d2h_items"];
  current().run();
  return at::native::_local_scalar_dense_cpu(alias_of(self));
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

at::Tensor& set_strided(at::Tensor& self, at::Storage from, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, from, offset, sizes, strides);
}

// --- all other operators -------------------------------------------------------------------------

// The size of their results depends on values, so the host waits for it.
const std::set<std::string> kWaiting = {
    "aten::nonzero",            "aten::masked_select",     "aten::equal",
    "aten::_unique2",           "aten::unique_dim",        "aten::unique_consecutive",
    "aten::repeat_interleave",  "aten::bincount",          "aten::is_nonzero"};
// CUDA accepts indices on the host for these, and copies them.
const std::set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                         "aten::index_put", "aten::_unsafe_index"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), name_(schema_.operator_name().name) {
    waits_ = kWaiting.count(name_), indexes_ = kIndexing.count(name_);
  }

  void run() {
    memory.begin();
    replace_arguments();
    if (waits_) count_wait(name_);
    ++counts["kernels"];
    current().run();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (auto& [alias, given] : empty_outputs_) {
      if (!alias.numel()) continue;
      if (given.sizes() != alias.sizes()) resize_(given, alias.sizes(), {});
      alias_of(given).copy_(alias);
    }
    replace_results();
  }

 private:
  using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;  // alias, tensor of the device

  void replace_arguments() {
    size_t count = schema_.arguments().size(), first = stack_.size() - count;
    for (size_t i = 0; i < count; ++i) {
      auto& value = stack_[first + i];
      const auto& argument = schema_.arguments()[i];
      bool written = argument.alias_info() && argument.alias_info()->isWrite();
      if (value.isTensor()) {
        value = for_cpu(value.toTensor(), written);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& one : value.toTensorVector()) list.push_back(for_cpu(one, written));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
          list.push_back(one ? std::optional<at::Tensor>(for_cpu(*one, written)) : one);
        value = list;
      } else if (value.isDevice()) {
        value = c10::Device(at::kCPU);
      } else if (value.isGenerator() || (value.isNone() && argument.name() == "generator")) {
        const auto& given = value.isNone() ? default_generator() : value.toGenerator();
        TORCH_CHECK(given.device().type() == kType, "Expected a 'fakegpu' device type for generator");
        value = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->inner;
      }
    }
  }

  at::Tensor for_cpu(const at::Tensor& given, bool written) {
    if (!given.defined()) return given;
    bool indexed = indexes_ && !std::exchange(index_follows_, true);
    if (!on_device(given)) {
      TORCH_CHECK(!indexed, "indices should be either on cpu or on the same device as the indexed "
                            "tensor (cpu)");
      if (given.device().is_cpu() && given.dim()) {
        TORCH_CHECK(indexes_ && !written && !at::isFloatingType(given.scalar_type()),
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    "fakegpu:0 and cpu! (", name_, ")");
        waits_ = true;  // for the copy of the index
      }
      return given;
    }
    bool flags = given.scalar_type() == at::kBool || given.scalar_type() == at::kByte;
    if (indexes_ && !indexed && !written && flags) waits_ = true;  // a mask, as in nonzero()
    if (written && !given.numel()) {
      auto alias = at::empty(given.sizes(), given.options().device(at::kCPU));
      empty_outputs_.emplace_back(alias, given);
      return alias;
    }
    aliases_.emplace_back(alias_of(given), given);
    return aliases_.back().first;
  }

  void replace_results() {
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i) {
      auto& value = stack_[i];
      if (value.isTensor()) {
        value = for_device(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& one : value.toTensorVector()) list.push_back(for_device(one));
        value = list;
      }
    }
  }

  at::Tensor for_device(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (auto* pairs : {&aliases_, &empty_outputs_})
      for (auto& [alias, given] : *pairs)
        if (alias.is_same(result)) return given;
    if (memory.is_for_kernels(result.data_ptr()))
      for (auto& [alias, given] : aliases_) {
        auto offset = static_cast<char*>(result.data_ptr()) -
                      memory.for_kernels(given.storage().data());
        if (offset >= 0 && size_t(offset) < given.storage().nbytes())  // a view of `given`
          return at::native::as_strided_tensorimpl(given, result.sizes(), result.strides(),
                                                   offset / given.itemsize());
      }
    return new_tensor(result);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const std::string& name_;
  bool waits_, indexes_, index_follows_ = false;
  Pairs aliases_, empty_outputs_;
};

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lock lock(mutex);
  memory.begin();
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  // Torch's default kernel looks at the indices twice, which would count two waits.
  m.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&call>());
}

}  // namespace fakegpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static fakegpu::Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(fakegpu::kType, &fakegpu::memory);
  m.def("counts", [] {
    fakegpu::Lock lock(fakegpu::mutex);
    return fakegpu::counts;
  });
  m.def("reset_counts", [] {
    fakegpu::Lock lock(fakegpu::mutex);
    fakegpu::counts.clear();
  });
  m.def("call_at_waits", [](py::object hook) {
    delete fakegpu::wait_hook;
    fakegpu::wait_hook = hook.is_none() ? nullptr : new py::object(hook);
  });
  m.def("lose", [](bool lost) { fakegpu::is_lost = lost; });
  m.def("is_initialized", [] { return fakegpu::memory.begun(); });
  m.def("is_in_bad_fork", [] { return fakegpu::memory.forked(); });
  m.def("default_generator", [] {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(fakegpu::default_generator()));
  });
}
