// A simulated accelerator on the PrivateUse1 key, called `sim`: asynchronous, and exact to the bit of the CPU.
//
// Every stream is a worker thread with a queue. An operator returns at once: the Meta kernel gives the shapes of its
// results, and its CPU kernel runs later, on the worker, on tensors that alias the same memory. What a device forgives
// on most days fails here at once: a freed block is taken again by the next allocation of its size on its stream, which
// overwrites it with 0xFF in the order of that stream; a task that comes too late for its memory raises; and each operator
// can be delayed.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include "device.h"

#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(SIM, 0);

// ------------------------------------------------------------------------------------------------------------- settings
std::atomic<int> delay_limit{0};    // microseconds: each operator waits a random time below it

// Called with the name of each host read, in the thread that reads; see `HostReads` in Python.
struct OnRead {
  PyObject* call = nullptr;
} on_read;

void note_read(const std::string& name) {
  if (on_read.call != nullptr) {
    py::gil_scoped_acquire gil;
    PyObject* result = PyObject_CallFunction(on_read.call, "s", name.c_str());
    if (result == nullptr) PyErr_Clear();
    Py_XDECREF(result);
  }
}

// -------------------------------------------------------------------------------------------------------------- streams
class Worker {
 public:
  explicit Worker(int64_t id) : id_(id), random_(static_cast<unsigned>(id + 1)) {
    std::thread([this] { run(); }).detach();
  }

  void push(std::string name, Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back({std::move(name), std::move(task)});
    }
    ready_.notify_one();
  }

  void settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }

  void drain() {
    settle();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_.empty()) {
      std::string error;
      std::swap(error, error_);
      TORCH_CHECK(false, "a kernel of the simulated device failed: ", error);
    }
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }

  void seed(unsigned seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    random_.seed(seed * 7919u + static_cast<unsigned>(id_));
  }

 private:
  void run() {
    at::set_num_threads(1);
    for (;;) {
      std::pair<std::string, Task> next;
      int delay = 0;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [&] { return !tasks_.empty(); });
        next = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
        if (const int limit = delay_limit) delay = static_cast<int>(random_() % static_cast<unsigned>(limit));
      }
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      try {
        next.second();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error_.empty()) error_ = next.first + ": " + error.what();
      }
      next.second = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        busy_ = false;
      }
      idle_.notify_all();
    }
  }

  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable ready_, idle_;
  std::deque<std::pair<std::string, Task>> tasks_;
  bool busy_ = false;
  std::mt19937 random_;
  std::string error_;
};

std::mutex workers_mutex;
std::vector<Worker*> workers;  // never freed: their threads live as long as the process
thread_local int64_t current = 0;

Worker& worker(int64_t id) {
  std::lock_guard<std::mutex> lock(workers_mutex);
  while (static_cast<int64_t>(workers.size()) <= id) workers.push_back(new Worker(static_cast<int64_t>(workers.size())));
  return *workers[id];
}

}  // namespace

int64_t current_stream() { return current; }

void push(int64_t stream, std::string name, Task task) { worker(stream).push(std::move(name), std::move(task)); }

int64_t new_stream() {
  std::unique_lock<std::mutex> lock(workers_mutex);
  const int64_t id = std::max<int64_t>(1, static_cast<int64_t>(workers.size()));
  lock.unlock();
  worker(id);
  return id;
}

void each_worker(const std::function<void(Worker&)>& act) {
  for (size_t i = 0;; i++) {
    Worker* next = nullptr;
    {
      std::lock_guard<std::mutex> lock(workers_mutex);
      if (i >= workers.size()) return;
      next = workers[i];
    }
    act(*next);
  }
}

void synchronize() {
  each_worker([](Worker& w) { w.drain(); });
}

// --------------------------------------------------------------------------------------------------------------- events
void Flag::raise() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    set = true;
  }
  changed.notify_all();
}

void Flag::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return set; });
}

bool Flag::is_set() {
  std::lock_guard<std::mutex> lock(mutex);
  return set;
}

FlagPtr record(int64_t stream) {
  auto flag = std::make_shared<Flag>();
  worker(stream).push("record", [flag] { flag->raise(); });
  return flag;
}

void wait_on(int64_t stream, FlagPtr flag) {
  worker(stream).push("wait", [flag = std::move(flag)] { flag->wait(); });
}

namespace {

// --------------------------------------------------------------------------------------------------------------- memory
struct Block {
  void* data;
  size_t size;
  int64_t stream;
  int64_t id;                 // no other block ever has it
  std::set<int64_t> readers;  // streams of `record_stream`
};

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = std::max<size_t>(512, (bytes + 511) / 512 * 512);
    void* data = nullptr;
    int64_t before = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (limit > 0 && live + size > limit) {
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "the simulated device has ", limit - live, " of ", limit, " bytes left, wanted ", size);
      }
      auto& free = free_[current];
      if (auto found = free.find(size); found != free.end()) {
        std::tie(data, before) = found->second;
        free.erase(found);
      }
      live += size;
      peak = std::max(peak, live);
    }
    if (data == nullptr) data = aligned_alloc(512, size);
    worker(current).push("poison", [this, data, size, before] {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        overwritten_.insert(before);
      }
      std::memset(data, 0xFF, size);
    });
    auto* block = new Block{data, size, current, 0, {}};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block->id = next_++;
      blocks_[data] = block;
    }
    return {data, block, &release, DEVICE};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    worker(current).push("copy", [=] { std::memcpy(to, from, bytes); });
  }

  void record_stream(void* data, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = blocks_.find(data); found != blocks_.end()) found->second->readers.insert(stream);
  }

  // The block that is at an address now; -1 if none is.
  int64_t block_at(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(const_cast<void*>(data));
    if (after == blocks_.begin()) return -1;
    const Block* block = (--after)->second;
    return static_cast<const char*>(data) < static_cast<char*>(block->data) + block->size ? block->id : -1;
  }

  bool is_overwritten(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return overwritten_.count(id) > 0;
  }

  size_t limit = 0, live = 0, peak = 0;

 private:
  static void release(void* context);

  std::mutex mutex_;
  std::unordered_map<int64_t, std::multimap<size_t, std::pair<void*, int64_t>>> free_;
  std::map<void*, Block*> blocks_;
  std::set<int64_t> overwritten_;
  int64_t next_ = 0;
};

Allocator device_memory;

void Allocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  for (const int64_t reader : block->readers) {
    if (reader != block->stream) wait_on(block->stream, record(reader));
  }
  void* data = block->data;
  const size_t size = block->size;
  std::lock_guard<std::mutex> lock(device_memory.mutex_);
  device_memory.blocks_.erase(data);
  device_memory.free_[block->stream].emplace(size, std::make_pair(data, block->id));
  device_memory.live -= size;
  delete block;
}
REGISTER_ALLOCATOR(SIM, &device_memory);

}  // namespace

Lifetimes::Lifetimes(const std::vector<Tensor>& xs) {
  for (const auto& x : xs) {
    if (!x.defined() || x.device().type() != SIM || x.numel() == 0) continue;
    ids_.push_back(device_memory.block_at(x.mutable_data_ptr()));
    shapes_.push_back(c10::str(x.sizes()));
  }
}

bool Lifetimes::are_valid() const {
  return std::none_of(ids_.begin(), ids_.end(), [](int64_t id) { return device_memory.is_overwritten(id); });
}

void Lifetimes::check(const std::string& reader) const {
  for (size_t i = 0; i < ids_.size(); i++) {
    TORCH_CHECK(
        !device_memory.is_overwritten(ids_[i]), reader, " uses a tensor ", shapes_[i],
        " that was freed, and whose memory another stream has reused before: a wait is missing");
  }
}

namespace {

// Page-locked memory of the host: only copies from and to it are asynchronous.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    void* data = aligned_alloc(64, size);
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[data] = size;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(const_cast<void*>(data));
    if (after == ranges_.begin()) return false;
    --after;
    return static_cast<const char*>(data) < static_cast<char*>(after->first) + after->second;
  }

 private:
  static void release(void* data);

  std::mutex mutex_;
  std::map<void*, size_t> ranges_;
};
PinnedAllocator pinned_memory;

void PinnedAllocator::release(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_memory.mutex_);
    pinned_memory.ranges_.erase(data);
  }
  each_worker([](Worker& w) { w.settle(); });  // a copy may still read or write it
  free(data);
}

// ------------------------------------------------------------------------------------------------- what torch asks a device
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int64_t before = current;
    current = next.id();
    return stream(before);
  }
  bool queryStream(const c10::Stream& s) const override { return worker(s.id()).is_idle(); }
  void synchronizeStream(const c10::Stream& s) const override { worker(s.id()).drain(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    device_memory.record_stream(data.get(), s.id());
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new FlagPtr;
    *static_cast<FlagPtr*>(*event) = sim::record(s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) wait_on(s.id(), *static_cast<FlagPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    return FlagPtr(*static_cast<FlagPtr*>(event))->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) FlagPtr(*static_cast<FlagPtr*>(event))->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<FlagPtr*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.holds(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = device_memory.allocate(bytes);
    const void* from = storage.data();
    void* to = data.get();
    if (const size_t kept = std::min(bytes, storage.nbytes())) {
      worker(current).push("resize", [=] { std::memcpy(to, from, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ------------------------------------------------------------------------------------------------------------ operators
bool is_sim(const Tensor& x) { return x.defined() && x.device().type() == SIM; }

}  // namespace

// What is freed too early is seen, since nothing here keeps it alive.
Tensor on_cpu(const Tensor& x) {
  if (!is_sim(x)) return x;
  return at::from_blob(x.mutable_data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

namespace {

Tensor on_meta(const Tensor& x) {
  return x.defined() ? at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta)) : x;
}

Tensor like(const Tensor& x) { return at::empty_strided(x.sizes(), x.strides(), x.options().device(DEVICE)); }

template <class F>
IValue with_tensors(const IValue& value, c10::Device device, F change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& x : value.toTensorVector()) changed.push_back(x.defined() ? change(x) : x);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor> x : value.toOptionalTensorList()) {
      changed.push_back(x && x->defined() ? std::optional<Tensor>(change(*x)) : x);
    }
    return changed;
  }
  if (value.isDevice() && value.toDevice().type() == SIM) return IValue(device);
  return value;
}

void copy_results(const std::vector<IValue>& to, torch::jit::Stack& from) {
  for (size_t i = 0; i < to.size(); i++) {
    if (from[i].isTensor()) {
      if (from[i].toTensor().defined()) to[i].toTensor().copy_(from[i].toTensor());
    } else {
      auto targets = to[i].toTensorVector(), sources = from[i].toTensorVector();
      for (size_t j = 0; j < targets.size(); j++) targets[j].copy_(sources[j]);
    }
  }
}

using Args = std::shared_ptr<std::vector<IValue>>;

torch::jit::Stack run_on_cpu(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  at::AutoDispatchBelowADInplaceOrView below;
  torch::jit::Stack stack(args);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

// The results of an operator that writes its arguments are those arguments; false if one is something else.
bool results_in_arguments(const c10::FunctionSchema& schema, const std::vector<IValue>& args, std::vector<IValue>& results) {
  for (const auto& returned : schema.returns()) {
    const auto* alias = returned.alias_info();
    size_t found = args.size();
    for (size_t i = 0; alias != nullptr && i < args.size(); i++) {
      const auto* own = schema.arguments()[i].alias_info();
      if (own != nullptr && own->isWrite() && own->beforeSets() == alias->beforeSets()) found = std::min(found, i);
    }
    if (found == args.size()) return false;
    results.push_back(args[found]);
  }
  return true;
}

// What the Meta kernel returns, whose shapes the results will have; nothing if it cannot tell.
std::optional<torch::jit::Stack> run_on_meta(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  torch::jit::Stack stack;
  for (const auto& arg : args) stack.push_back(with_tensors(arg, c10::Device(at::kMeta), on_meta));
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

// New tensors of the shapes that the Meta kernel gives; false if it cannot tell.
bool results_of_meta(const c10::OperatorHandle& op, const std::vector<IValue>& args, std::vector<IValue>& results) {
  const auto stack = run_on_meta(op, args);
  if (!stack) return false;
  for (const auto& value : *stack) {
    if (!value.isTensor() && !value.isTensorList()) return false;
    results.push_back(with_tensors(value, DEVICE, like));
  }
  return !results.empty();
}

// `out=` arguments of another size are resized before the kernel is queued.
void resize_outputs(const c10::OperatorHandle& op, const std::vector<IValue>& args, const std::vector<IValue>& results) {
  const auto stack = run_on_meta(op, args);
  for (size_t i = 0; stack && i < results.size() && i < stack->size(); i++) {
    if (!results[i].isTensor() || !(*stack)[i].isTensor()) continue;
    const Tensor result = results[i].toTensor(), wanted = (*stack)[i].toTensor();
    if (result.sizes() != wanted.sizes()) at::native::resize_(result, wanted.sizes());
  }
}

// An operator whose results depend on values waits for its stream, as it does on a real device.
void run_at_once(const c10::OperatorHandle& op, const std::vector<IValue>& args, const Args& cpu, torch::jit::Stack* stack) {
  note_read(op.schema().name());
  worker(current).drain();
  for (const auto& value : run_on_cpu(op, *cpu)) {
    stack->push_back(with_tensors(value, DEVICE, [&](const Tensor& x) {
      for (const auto& arg : args) {
        if (arg.isTensor() && is_sim(arg.toTensor()) && arg.toTensor().data_ptr() == x.data_ptr()) return arg.toTensor();
      }
      auto result = like(x);
      on_cpu(result).copy_(x);
      return result;
    }));
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<IValue> args(stack->end() - static_cast<long>(count), stack->end());
  torch::jit::drop(*stack, count);
  auto cpu = std::make_shared<std::vector<IValue>>();

  bool writes = false;
  for (const auto& returned : schema.returns()) {
    const auto* alias = returned.alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "a view needs a kernel of its own: ", schema.name());
  }
  for (const auto& argument : schema.arguments()) {
    writes = writes || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  std::vector<IValue> results;
  const bool queued = writes ? results_in_arguments(schema, args, results) : results_of_meta(op, args, results);
  if (queued && writes && schema.overload_name().find("out") != std::string::npos) resize_outputs(op, args, results);
  for (const auto& arg : args) cpu->push_back(with_tensors(arg, c10::Device(at::kCPU), on_cpu));
  if (!queued) return run_at_once(op, args, cpu, stack);

  std::vector<Tensor> used;
  for (const std::vector<IValue>* values : std::vector<const std::vector<IValue>*>{&args, &results}) {
    for (const auto& value : *values) {
      with_tensors(value, DEVICE, [&](const Tensor& x) { used.push_back(x); return x; });
    }
  }
  const Lifetimes lifetimes(used);
  std::vector<IValue> targets;
  if (!writes) {
    for (const auto& result : results) targets.push_back(with_tensors(result, c10::Device(at::kCPU), on_cpu));
  }
  worker(current).push(schema.name(), [op, cpu, targets, lifetimes] {
    lifetimes.check(op.schema().name());
    auto values = run_on_cpu(op, *cpu);
    copy_results(targets, values);
  });
  for (auto& result : results) stack->push_back(result);
}

// ------------------------------------------------------------------------------- operators that are not kernels of the CPU
Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &device_memory, key, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  const c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, key, c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

Tensor reshape_alias(const Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return as_strided(x, sizes, strides, x.sym_storage_offset());
}

Tensor view(const Tensor& x, c10::SymIntArrayRef sizes) { return at::native::view(x, C10_AS_INTARRAYREF_SLOW(sizes)); }

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (is_sim(from) && !is_sim(to)) {
    if (non_blocking && pinned_memory.holds(to.data_ptr())) {
      worker(current).push("copy to host", [a = on_cpu(from), b = to]() mutable { b.copy_(a); });
    } else {
      note_read("copy to host");
      worker(current).drain();
      const_cast<Tensor&>(to).copy_(on_cpu(from));
    }
    return to;
  }
  // Pageable memory may change after the call; pinned memory is read when the copy runs.
  const bool keeps = is_sim(from) || pinned_memory.holds(from.data_ptr());
  worker(current).push(is_sim(from) ? "copy" : "copy to device", [a = keeps ? on_cpu(from) : from.clone(), b = on_cpu(to)]() mutable {
    b.copy_(a);
  });
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& x) {
  note_read("aten::_local_scalar_dense");
  worker(current).drain();
  return at::_local_scalar_dense(on_cpu(x));
}

const Tensor& resize(const Tensor& x, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  const size_t needed = static_cast<size_t>(x.storage_offset() + x.numel()) * x.itemsize();
  if (x.storage().nbytes() < needed) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(x.storage(), needed);
  return x;
}

Tensor& set_storage(Tensor& x, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  return x;
}

bool is_set_to(const Tensor& x, const Tensor& y) {
  return x.storage().unsafeGetStorageImpl() == y.storage().unsafeGetStorageImpl() &&
      x.storage_offset() == y.storage_offset() && x.sizes() == y.sizes() && x.strides() == y.strides();
}

void record_stream(Tensor& x, c10::Stream s) { device_memory.record_stream(x.storage().mutable_data(), s.id()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Operators that torch decomposes on a device without a kernel of its own, and not on the CPU, such as silu_backward: the
// decomposition would round differently.
void use_kernels_of_cpu() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

void add_backend(py::module_& m);  // backend.cpp

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  add_backend(m);
  m.def("register_hooks", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    use_kernels_of_cpu();
  });
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("delay", [](int limit, unsigned seed) {
    delay_limit = limit;
    std::lock_guard<std::mutex> lock(workers_mutex);
    for (auto* w : workers) w->seed(seed);
  });
  m.def("on_read", [](py::object call) {
    Py_XDECREF(on_read.call);
    on_read.call = call.is_none() ? nullptr : call.release().ptr();
  });
  m.def("memory", [] { return std::make_pair(device_memory.live, device_memory.peak); });
  m.def("reset_peak", [] { device_memory.peak = device_memory.live; });
  m.def("limit", [](size_t bytes) { device_memory.limit = bytes; });
}
