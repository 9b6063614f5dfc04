// Collectives of the simulated device, as a communicator of NCCL has them: asynchronous, in order, on a stream of its own.
//
// A collective waits for the stream that calls it, and runs on the communicator's stream, by gloo, on the same memory.
// `Work::wait` is a dependency between streams; the host does not wait.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include "device.h"

namespace sim {
namespace {

using at::Tensor;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;

class SimWork final : public Work {
 public:
  SimWork(FlagPtr done, Tensors kept) : done_(std::move(done)), kept_(std::move(kept)) {}

  bool isCompleted() override { return done_->is_set(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait_on(current_stream(), done_, where()); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    kept_.clear();
    return true;
  }

 private:
  FlagPtr done_;
  Tensors kept_;  // alive until the caller's stream waits, as a communicator keeps them
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)), stream_(new_stream_of_communicator()) {}

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }

  // Between these two calls nothing starts; then all begin at once, so that none waits for one that comes after it.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { group_ = std::make_unique<Group>(); }
  WorkPtr endCoalescing() override {
    const auto group = std::move(group_);
    const auto all = [calls = group->calls]() mutable {
      std::vector<WorkPtr> works;
      for (auto& call : calls) works.push_back(call());
      for (auto& work : works) work->wait();
    };
    return queue("group of messages", group->reads, group->writes, all);
  }

  WorkPtr allreduce(Tensors& xs, const c10d::AllreduceOptions& options) override {
    return start("all-reduce", xs, xs, [=, gloo = gloo_, xs = host(xs)]() mutable { return gloo->allreduce(xs, options); });
  }
  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& options) override {
    return start("broadcast", xs, xs, [=, gloo = gloo_, xs = host(xs)]() mutable { return gloo->broadcast(xs, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& xs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> results;
    Tensors written;
    for (auto& each : outs) {
      results.push_back(host(each));
      written.insert(written.end(), each.begin(), each.end());
    }
    return start("all-gather", xs, written, [=, gloo = gloo_, xs = host(xs)]() mutable { return gloo->allgather(results, xs, options); });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& x, const c10d::AllgatherOptions& options) override {
    return start("all-gather", {x}, {out}, [=, gloo = gloo_, out = on_cpu(out), x = on_cpu(x)]() mutable {
      return gloo->_allgather_base(out, x, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& x, const c10d::ReduceScatterOptions& options) override {
    return start("reduce-scatter", {x}, {out}, [=, gloo = gloo_, out = on_cpu(out), x = on_cpu(x)]() mutable {
      return gloo->_reduce_scatter_base(out, x, options);
    });
  }
  WorkPtr alltoall_base(
      Tensor& out, Tensor& x, std::vector<int64_t>& outs, std::vector<int64_t>& ins, const c10d::AllToAllOptions& options) override {
    return start("all-to-all", {x}, {out}, [=, gloo = gloo_, out = on_cpu(out), x = on_cpu(x)]() mutable {
      return gloo->alltoall_base(out, x, outs, ins, options);
    });
  }
  WorkPtr send(Tensors& xs, int to, int tag) override {
    return start("send", xs, {}, [=, gloo = gloo_, xs = host(xs)]() mutable { return gloo->send(xs, to, tag); });
  }
  WorkPtr recv(Tensors& xs, int from, int tag) override {
    return start("receive", {}, xs, [=, gloo = gloo_, xs = host(xs)]() mutable { return gloo->recv(xs, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start("barrier", {}, {}, [=, gloo = gloo_]() { return gloo->barrier(options); });
  }

 private:
  static Tensors host(const Tensors& xs) {
    Tensors result;
    for (const auto& x : xs) result.push_back(on_cpu(x));
    return result;
  }

  struct Group {
    std::vector<std::function<WorkPtr()>> calls;
    Tensors reads, writes;
  };

  template <class F>
  WorkPtr start(const std::string& name, const Tensors& reads, const Tensors& writes, F call) {
    if (!group_) return queue(name, reads, writes, [call]() mutable { call()->wait(); });
    group_->calls.push_back(call);
    group_->reads.insert(group_->reads.end(), reads.begin(), reads.end());
    group_->writes.insert(group_->writes.end(), writes.begin(), writes.end());
    return c10::make_intrusive<SimWork>(record(stream_), Tensors{});
  }

  WorkPtr queue(const std::string& name, const Tensors& reads, const Tensors& writes, Task task) {
    wait_on(stream_, record(current_stream()), "the collective was called");
    push(stream_, name, std::move(task), memory_of(reads, writes));
    Tensors kept = reads;
    kept.insert(kept.end(), writes.begin(), writes.end());
    return c10::make_intrusive<SimWork>(record(stream_), kept);
  }

  std::unique_ptr<Group> group_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  const int64_t stream_;
};

}  // namespace

void add_backend(py::module_& m) {
  py::module_::import("torch.distributed");
  py::class_<SimBackend, c10d::Backend, c10::intrusive_ptr<SimBackend>>(m, "SimBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>());
}

}  // namespace sim
