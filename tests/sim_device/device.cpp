// A simulated accelerator on the PrivateUse1 key, called `sim`: asynchronous, and exact to the bit of the CPU.
//
// Every stream is a worker thread with a queue. An operator returns at once: the Meta kernel gives the shapes of its
// results, and its CPU kernel runs later, on the worker, on tensors that alias the same memory. What a device forgives
// on most days fails here at once: a freed block is taken again by the next allocation of its size on its stream, which
// overwrites it with 0xFF in the order of that stream; each operator can be delayed; and a host that touches the memory
// of the device is killed. While a log is kept, each task is a row with the blocks of memory that it reads and writes, from
// which a missing wait follows without any delay.

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <utility>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(SIM, 0);

// --------------------------------------------------------------------------------------------------------------- memory
// The memory is mapped twice: tensors have the addresses of the first mapping, where nothing may be read or written, and
// tasks reach the same bytes in the second.
class Arena {
 public:
  void* take(size_t bytes) {
    const size_t begin = used_;
    used_ += bytes;
    TORCH_CHECK(used_ <= SIZE, "the simulated device has no addresses left");
    return seen_ + begin;
  }

  // Where a task finds what a pointer of the device leads to; a pointer of the host is that itself.
  void* reach(const void* data) const {
    auto* at = static_cast<char*>(const_cast<void*>(data));
    return at >= seen_ && at < seen_ + SIZE ? reached_ + (at - seen_) : at;
  }

 private:
  static constexpr size_t SIZE = size_t{1} << 36;

  static int file() {
    static const int result = [] {
      const int made = memfd_create("simulated device", 0);
      TORCH_CHECK(made >= 0 && ftruncate(made, SIZE) == 0, "no memory for the simulated device");
      return made;
    }();
    return result;
  }
  static char* map(int rights) {
    void* result = mmap(nullptr, SIZE, rights, MAP_SHARED | MAP_NORESERVE, file(), 0);
    TORCH_CHECK(result != MAP_FAILED, "no addresses for the simulated device");
    return static_cast<char*>(result);
  }

  char* const seen_ = map(PROT_NONE);
  char* const reached_ = map(PROT_READ | PROT_WRITE);
  size_t used_ = 0;
};

Arena& arena() {
  static auto* result = new Arena;
  return *result;
}

std::atomic<int64_t> next_block{0};  // of the device, and of pages of pinned memory
constexpr size_t PAGE = 256;

struct Block {
  void* data;
  size_t size;
  int64_t stream;
  int64_t graph;              // memory that a graph took is the graph's alone, 0 outside
  int64_t id;                 // no other block ever has it
  std::set<int64_t> readers;  // streams of `record_stream`
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, DEVICE};
    const size_t size = (bytes + 511) / 512 * 512;
    const int64_t stream = current_stream();
    auto* block = new Block{nullptr, size, stream, graph_of(stream), 0, {}};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (limit > 0 && live + size > limit) {
        delete block;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "the simulated device has ", limit - live, " of ", limit, " bytes left, wanted ", size);
      }
      auto& free = free_[{stream, block->graph}];
      if (auto found = free.find(size); found != free.end()) {
        block->data = found->second;
        free.erase(found);
      } else {
        block->data = arena().take(size);
      }
      block->id = next_block++;
      blocks_[block->data] = block;
      live += size;
      peak = std::max(peak, live);
    }
    note({stream, "take", "sim", {{}, {block->id}, static_cast<int64_t>(size)}});
    push(stream, "poison", [data = arena().reach(block->data), size] { std::memset(data, 0xFF, size); }, {{}, {block->id}});
    return {block->data, block, &release, DEVICE};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    push(current_stream(), "copy", [=] { std::memcpy(arena().reach(to), arena().reach(from), bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream s) override { record_stream(data.get(), s.id()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = static_cast<int64_t>(live);
    bytes.peak = static_cast<int64_t>(peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = live; }

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

  // The blocks that are taken, as rows of a log.
  std::vector<Row> blocks() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Row> result;
    for (const auto& [data, block] : blocks_) {
      result.push_back({block->stream, "take", "sim", {{}, {block->id}, static_cast<int64_t>(block->size)}});
    }
    return result;
  }

  size_t limit = 0, live = 0, peak = 0;

 private:
  static void release(void* context);

  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, std::multimap<size_t, void*>> free_;  // by stream and graph
  std::map<void*, Block*> blocks_;
};

Allocator device_memory;

void Allocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  for (const int64_t reader : block->readers) {
    if (reader != block->stream) wait_on(block->stream, record(reader), "record_stream");
  }
  note({block->stream, "free", "sim", {{}, {block->id}, static_cast<int64_t>(block->size)}});
  std::lock_guard<std::mutex> lock(device_memory.mutex_);
  device_memory.blocks_.erase(block->data);
  device_memory.free_[{block->stream, block->graph}].emplace(block->size, block->data);
  device_memory.live -= block->size;
  delete block;
}
REGISTER_ALLOCATOR(SIM, &device_memory);

// Page-locked memory of the host: only copies from and to it are asynchronous. What is freed while a copy may still read or
// write it is handed out again when that copy is done.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    void* data = aligned_alloc(64, size);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [copies, freed] : freed_) {
      if (freed != nullptr && done(copies)) free(std::exchange(freed, nullptr));
    }
    freed_.erase(std::remove_if(freed_.begin(), freed_.end(), [](auto& x) { return x.second == nullptr; }), freed_.end());
    blocks_[data] = {size, next_block.fetch_add(static_cast<int64_t>(size / PAGE + 1)), {}};
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(data) != blocks_.end();
  }

  // The numbers of the pages of a tensor, since two streams may copy other parts of a block; none if it is not pinned.
  std::vector<int64_t> pages_of(const Tensor& x) {
    const char* data = static_cast<const char*>(x.mutable_data_ptr());
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = find(data);
    if (found == blocks_.end()) return {};
    const size_t first = data - static_cast<char*>(found->first);
    const size_t last = x.is_contiguous() ? first + x.nbytes() : found->second.size;
    std::vector<int64_t> pages;
    for (size_t page = first / PAGE; page * PAGE < last; ++page) pages.push_back(found->second.id + page);
    return pages;
  }

  // A copy of a block begins; the flag is raised at its end. Nothing for memory that is not pinned.
  FlagPtr begin_copy(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = find(data);
    if (found == blocks_.end()) return nullptr;
    found->second.copies.push_back(std::make_shared<Flag>());
    return found->second.copies.back();
  }

 private:
  struct Pinned {
    size_t size;
    int64_t id;
    std::vector<FlagPtr> copies;
  };

  static bool done(const std::vector<FlagPtr>& copies) {
    return std::all_of(copies.begin(), copies.end(), [](const FlagPtr& copy) { return copy->is_set(); });
  }
  static void release(void* data);

  std::map<void*, Pinned>::iterator find(const void* data) {
    auto after = blocks_.upper_bound(const_cast<void*>(data));
    if (after == blocks_.begin()) return blocks_.end();
    --after;
    const bool inside = static_cast<const char*>(data) < static_cast<char*>(after->first) + after->second.size;
    return inside ? after : blocks_.end();
  }

  std::mutex mutex_;
  std::map<void*, Pinned> blocks_;
  std::vector<std::pair<std::vector<FlagPtr>, void*>> freed_;
};
PinnedAllocator pinned_memory;
REGISTER_HOST_ALLOCATOR(SIM, &pinned_memory);

void PinnedAllocator::release(void* data) {
  std::lock_guard<std::mutex> lock(pinned_memory.mutex_);
  const auto found = pinned_memory.blocks_.find(data);
  pinned_memory.freed_.emplace_back(std::move(found->second.copies), data);
  pinned_memory.blocks_.erase(found);
}

}  // namespace

Memory memory_of(const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
  Memory result;
  if (!is_logging()) return result;
  const auto list = [&](const std::vector<Tensor>& xs, std::vector<int64_t>& ids) {
    for (const auto& x : xs) {
      if (!x.defined() || x.numel() == 0) continue;
      const bool on_device = x.device().type() == SIM;
      if (!on_device && !x.is_cpu()) continue;
      if (!on_device) {
        for (const int64_t page : pinned_memory.pages_of(x)) ids.push_back(page);
        continue;
      }
      const int64_t id = device_memory.block_at(x.mutable_data_ptr());
      if (id < 0) continue;
      ids.push_back(id);
      result.nbytes += static_cast<int64_t>(x.nbytes());
    }
  };
  list(reads, result.reads);
  list(writes, result.writes);
  return result;
}

namespace {

// ------------------------------------------------------------------------------------------------- what torch asks a device
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(exchange_stream(next.id())); }
  bool queryStream(const c10::Stream& s) const override { return is_idle(s.id()); }
  void synchronizeStream(const c10::Stream& s) const override { drain(s.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    device_memory.record_stream(data.get(), s.id());
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new FlagPtr;
    *static_cast<FlagPtr*>(*event) = sim::record(s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) wait_on(s.id(), *static_cast<FlagPtr*>(event), where());
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
    const void* from = arena().reach(storage.data());
    void* to = arena().reach(data.get());
    if (const size_t kept = std::min(bytes, storage.nbytes())) {
      push(current_stream(), "resize", [=] { std::memcpy(to, from, kept); });
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
  return at::from_blob(arena().reach(x.mutable_data_ptr()), x.sizes(), x.strides(), x.options().device(at::kCPU));
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

// A copy that a stream makes. Autograd has seen it when it was issued; by now a view may have been left behind.
void copy_late(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  const_cast<Tensor&>(to).copy_(from);
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
  drain(current_stream());
  for (const auto& value : run_on_cpu(op, *cpu)) {
    stack->push_back(with_tensors(value, DEVICE, [&](const Tensor& x) {
      for (const auto& arg : args) {
        if (arg.isTensor() && is_sim(arg.toTensor()) && on_cpu(arg.toTensor()).data_ptr() == x.data_ptr()) {
          return arg.toTensor();
        }
      }
      auto result = like(x);
      push(current_stream(), op.schema().name(), [a = x, b = on_cpu(result)] { copy_late(b, a); }, memory_of({}, {result}));
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

  std::vector<Tensor> reads, written;
  for (size_t i = 0; i < args.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    auto& used = alias != nullptr && alias->isWrite() ? written : reads;
    with_tensors(args[i], DEVICE, [&](const Tensor& x) { used.push_back(x); return x; });
  }
  for (const auto& result : results) {
    with_tensors(result, DEVICE, [&](const Tensor& x) { written.push_back(x); return x; });
  }
  std::vector<IValue> targets;
  if (!writes) {
    for (const auto& result : results) targets.push_back(with_tensors(result, c10::Device(at::kCPU), on_cpu));
  }
  const auto task = [op, cpu, targets] {
    auto values = run_on_cpu(op, *cpu);
    copy_results(targets, values);
  };
  push(current_stream(), schema.name(), task, memory_of(reads, written));
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
  if (from.numel() == 0) return to;
  const bool to_host = is_sim(from) && !is_sim(to);
  if (to_host && !(non_blocking && pinned_memory.holds(to.data_ptr()))) {
    note_read("copy to host");
    drain(current_stream());
    const_cast<Tensor&>(to).copy_(on_cpu(from));
    return to;
  }
  // Pageable memory may change after the call; pinned memory is read when the copy runs.
  const bool keeps = is_sim(from) || pinned_memory.holds(from.data_ptr());
  TORCH_CHECK(keeps || graph_of(current_stream()) == 0, "a graph records a copy from pageable memory of the host");
  const auto copied = pinned_memory.begin_copy((is_sim(from) ? to : from).data_ptr());
  const auto task = [copied, a = keeps ? on_cpu(from) : from.clone(), b = on_cpu(to)]() mutable {
    copy_late(b, a);
    if (copied) copied->raise();
  };
  push(current_stream(), "copy", task, memory_of({from}, {to}));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& x) {
  note_read("aten::_local_scalar_dense");
  drain(current_stream());
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

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  add_streams(m);
  add_backend(m);
  m.def("register_hooks", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    use_kernels_of_cpu();
  });
  m.def("start_log", [] { start_log(device_memory.blocks()); });
  m.def("limit", [](size_t bytes) { device_memory.limit = bytes; });
}
