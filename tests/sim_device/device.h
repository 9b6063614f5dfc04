// Streams and events of the simulated device, for what else is made of them.

#pragma once

#include <ATen/Tensor.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

using Task = std::function<void()>;

// An event: raised by a task of the stream that records it, waited for by tasks of others.
struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool set = false;

  void raise();
  void wait();
  bool is_set();
};
using FlagPtr = std::shared_ptr<Flag>;

int64_t new_stream();
int64_t current_stream();
void push(int64_t stream, std::string name, Task task);
FlagPtr record(int64_t stream);
void wait_on(int64_t stream, FlagPtr flag);

// Which memory a task was given, so that it can tell whether another stream has taken it meanwhile.
class Lifetimes {
 public:
  explicit Lifetimes(const std::vector<at::Tensor>& xs);
  bool are_valid() const;
  void check(const std::string& reader) const;  // raises

 private:
  std::vector<int64_t> ids_;
  std::vector<std::string> shapes_;
};

// The same memory as a tensor of the CPU. It owns nothing.
at::Tensor on_cpu(const at::Tensor& x);

}  // namespace sim
