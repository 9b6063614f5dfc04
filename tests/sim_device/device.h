// Streams, events and the log of the simulated device, for what else is made of them.

#pragma once

#include <ATen/Tensor.h>
#include <torch/extension.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

using Task = std::function<void()>;
using Clock = std::map<int64_t, int64_t>;  // by stream: how many of its tasks are known to be done

// The blocks of memory that a task reads and writes, by their numbers, and the bytes of both.
struct Memory {
  std::vector<int64_t> reads, writes;
  int64_t nbytes = 0;
};
Memory memory_of(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes);

// An event: raised by a task of the stream that records it, waited for by tasks of others. In a graph it is raised once
// in each replay.
struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t count = 0;   // how often it was raised
  int64_t number = 0;  // in the log
  int64_t graph = 0;   // the graph in which it was recorded, 0 outside
  Clock before;        // in that graph: what is done when it is raised

  void raise();
  void wait(int64_t times = 1);
  bool is_set();
};
using FlagPtr = std::shared_ptr<Flag>;

int64_t new_stream();
int64_t new_stream_of_communicator();  // graphs run its tasks on it, too: its messages have one order
int64_t current_stream();
int64_t exchange_stream(int64_t next);
void push(int64_t stream, std::string name, Task task, Memory memory = {});
FlagPtr record(int64_t stream);
void wait_on(int64_t stream, FlagPtr flag, std::string why);

// The host waits; errors of tasks are raised here.
void drain(int64_t stream);
void synchronize();
bool is_idle(int64_t stream);

int64_t graph_of(int64_t stream);  // the number of the graph that records what the stream is given; 0 if none does

// A line of the log, as `fsharding.testing.stream_log.Row`.
struct Row {
  int64_t stream;
  std::string kind, text;
  Memory memory;
  int64_t event = -1;
};
void start_log(std::vector<Row> first);
bool is_logging();
void note(Row row);
std::string where();  // the line of Python that is at work, while the log is kept
void note_read(const std::string& name);

// The same memory as a tensor of the CPU. It owns nothing.
at::Tensor on_cpu(const at::Tensor& x);

void add_streams(py::module_& m);
void add_backend(py::module_& m);

}  // namespace sim
