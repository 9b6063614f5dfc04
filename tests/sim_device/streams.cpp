// Streams, events and graphs of the simulated device, and the log of what its streams are given.
//
// A stream is a worker thread with a queue. A graph keeps what its streams are given instead of passing it on, and a
// replay passes it on again: what the recording stream was given goes to the current one, each other stream's tasks go to
// a thread of the graph's own, so that branches run side by side.

#include "device.h"

#include <c10/core/DeviceType.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <random>
#include <set>
#include <thread>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define SIM_GRAPHS
#endif

namespace sim {
namespace {

// ------------------------------------------------------------------------------------------------------------------ log
std::atomic<bool> logging{false};
std::mutex log_mutex;
std::vector<Row> rows;
std::atomic<int64_t> events{0};
PyObject* on_note = nullptr;  // called with "read" or "wait" and a name, in the thread that does it; returns a line

std::string ask(const char* kind, const std::string& name) {
  if (on_note == nullptr) return "";
  py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(on_note, "ss", kind, name.c_str());
  std::string line = result != nullptr && PyUnicode_Check(result) ? PyUnicode_AsUTF8(result) : "";
  if (result == nullptr) PyErr_Clear();
  Py_XDECREF(result);
  return line;
}

// -------------------------------------------------------------------------------------------------------------- streams
std::atomic<int> delay_limit{0};  // microseconds: each task waits a random time below it

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
std::set<int64_t> communicators;
thread_local int64_t current = 0;

Worker& worker(int64_t id) {
  std::lock_guard<std::mutex> lock(workers_mutex);
  while (static_cast<int64_t>(workers.size()) <= id) workers.push_back(new Worker(static_cast<int64_t>(workers.size())));
  return *workers[id];
}

int64_t count_of_workers() {
  std::lock_guard<std::mutex> lock(workers_mutex);
  return static_cast<int64_t>(workers.size());
}

// --------------------------------------------------------------------------------------------------------------- graphs
struct Item {
  int64_t stream;
  std::string name;
  Task task;
  Memory memory;
  FlagPtr raised, awaited;
};

struct Graph {
  const int64_t number;
  const int64_t origin;
  std::map<int64_t, Clock> clocks;  // of the streams that are recorded
  std::vector<Item> items;
  std::map<int64_t, int64_t> branches;
  int64_t replays = 0;

  Graph(int64_t number, int64_t origin) : number(number), origin(origin) { clocks[origin]; }

  void end() {
    for (const auto& [stream, clock] : clocks) {
      const auto done = clock.find(stream);
      TORCH_CHECK(
          done == clock.end() || clocks[origin][stream] >= done->second, "the graph ends before the work of stream ", stream,
          " that it recorded: a wait is missing");
    }
  }

  int64_t stream_of(int64_t stream) {
    if (stream == origin) return current;
    if (communicators.count(stream) > 0) return stream;
    auto& branch = branches[stream];
    if (branch == 0) branch = new_stream();
    return branch;
  }

  void replay() {
    replays++;
    std::map<int64_t, int64_t> numbers;  // of events, in the log
    for (const auto& item : items) {
      const int64_t stream = stream_of(item.stream);
      if (item.raised) {
        note({stream, "record", item.name, {}, numbers[item.raised->number] = events++});
        worker(stream).push(item.name, [flag = item.raised] { flag->raise(); });
      } else if (item.awaited) {
        note({stream, "wait", item.name, {}, numbers.at(item.awaited->number)});
        worker(stream).push(item.name, [flag = item.awaited, times = replays] { flag->wait(times); });
      } else {
        note({stream, "run", item.name, item.memory});
        worker(stream).push(item.name, item.task);
      }
    }
  }
};

std::mutex graph_mutex;
std::shared_ptr<Graph> recording;
int64_t graphs = 0;

std::shared_ptr<Graph> recording_of(int64_t stream) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  return recording && recording->clocks.count(stream) > 0 ? recording : nullptr;
}

#ifdef SIM_GRAPHS
struct GraphImpl final : at::GraphImplInterface {
  explicit GraphImpl(const at::GraphImplArgs&) {}

  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    TORCH_CHECK(current != 0, "a graph is not recorded on the default stream");
    std::lock_guard<std::mutex> lock(graph_mutex);
    TORCH_CHECK(!recording, "another graph is being recorded");
    graph_ = recording = std::make_shared<Graph>(++graphs, current);
  }
  void capture_end() override {
    {
      std::lock_guard<std::mutex> lock(graph_mutex);
      recording = nullptr;
    }
    graph_->end();
  }
  void instantiate() override {}
  void replay() override { graph_->replay(); }
  void reset() override { graph_ = nullptr; }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

  std::shared_ptr<Graph> graph_;
};
#endif

}  // namespace

int64_t graph_of(int64_t stream) {
  const auto graph = recording_of(stream);
  return graph ? graph->number : 0;
}

bool is_logging() { return logging; }

void note(Row row) {
  if (!logging) return;
  std::lock_guard<std::mutex> lock(log_mutex);
  rows.push_back(std::move(row));
}

std::string where() { return logging ? ask("wait", "") : ""; }

void note_read(const std::string& name) { ask("read", name); }

int64_t current_stream() { return current; }

int64_t exchange_stream(int64_t next) { return std::exchange(current, next); }

int64_t new_stream() {
  const int64_t id = std::max<int64_t>(1, count_of_workers());
  worker(id);
  return id;
}

int64_t new_stream_of_communicator() {
  const int64_t id = new_stream();
  communicators.insert(id);
  return id;
}

void push(int64_t stream, std::string name, Task task, Memory memory) {
  if (auto graph = recording_of(stream)) {
    graph->clocks[stream][stream]++;
    graph->items.push_back({stream, std::move(name), std::move(task), std::move(memory)});
    return;
  }
  note({stream, "run", name, std::move(memory)});
  worker(stream).push(std::move(name), std::move(task));
}

void drain(int64_t stream) {
  TORCH_CHECK(graph_of(stream) == 0, "the host waits for a stream while a graph records it");
  worker(stream).drain();
  if (!logging) return;
  const FlagPtr done = record(stream);
  for (int64_t other = 0; other < count_of_workers(); other++) wait_on(other, done, "the host waited");
}

void synchronize() {
  for (int64_t stream = 0; stream < count_of_workers(); stream++) drain(stream);
}

bool is_idle(int64_t stream) { return worker(stream).is_idle(); }

// --------------------------------------------------------------------------------------------------------------- events
void Flag::raise() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    count++;
  }
  changed.notify_all();
}

void Flag::wait(int64_t times) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return count >= times; });
}

bool Flag::is_set() {
  std::lock_guard<std::mutex> lock(mutex);
  return count > 0;
}

FlagPtr record(int64_t stream) {
  auto flag = std::make_shared<Flag>();
  flag->number = events++;
  if (auto graph = recording_of(stream)) {
    flag->graph = graph->number;
    flag->before = graph->clocks[stream];
    graph->items.push_back({stream, "record", nullptr, {}, flag, nullptr});
    return flag;
  }
  note({stream, "record", "", {}, flag->number});
  worker(stream).push("record", [flag] { flag->raise(); });
  return flag;
}

void wait_on(int64_t stream, FlagPtr flag, std::string why) {
  if (flag->graph != 0) {
    std::lock_guard<std::mutex> lock(graph_mutex);
    TORCH_CHECK(recording && recording->number == flag->graph, "an event of a graph is waited for outside of it");
    Clock& clock = recording->clocks[stream];  // from now on the stream is recorded, too
    for (const auto& [other, tick] : flag->before) clock[other] = std::max(clock[other], tick);
    recording->items.push_back({stream, std::move(why), nullptr, {}, nullptr, std::move(flag)});
    return;
  }
  TORCH_CHECK(graph_of(stream) == 0, "a graph records a wait for an event from before it");
  note({stream, "wait", std::move(why), {}, flag->number});
  worker(stream).push("wait", [flag = std::move(flag)] { flag->wait(); });
}

void start_log(std::vector<Row> first) {
  std::lock_guard<std::mutex> lock(log_mutex);
  rows = std::move(first);
  logging = true;
}

// --------------------------------------------------------------------------------------------------------------- Python
void add_streams(py::module_& m) {
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("is_capturing", [] { return graph_of(current) != 0; });
  m.def("delay", [](int limit, unsigned seed) {
    delay_limit = limit;
    std::lock_guard<std::mutex> lock(workers_mutex);
    for (auto* w : workers) w->seed(seed);
  });
  m.def("on_note", [](py::object call) {
    Py_XDECREF(on_note);
    on_note = call.is_none() ? nullptr : call.release().ptr();
  });
  m.def("end_log", [] {
    logging = false;
    std::lock_guard<std::mutex> lock(log_mutex);
    py::list result;
    for (const auto& row : rows) {
      const auto& [reads, writes, nbytes] = row.memory;
      result.append(py::make_tuple(row.stream, row.kind, row.text, reads, writes, row.event, 0, nbytes));
    }
    return result;
  });
  m.def("communicators", [] { return std::vector<int64_t>(communicators.begin(), communicators.end()); });
#ifdef SIM_GRAPHS
  m.def("register_graphs", [] {
    at::GraphImplRegistry()->Register(
        c10::DeviceTypeName(c10::DeviceType::PrivateUse1, false),
        [](const at::GraphImplArgs& args) { return std::make_unique<GraphImpl>(args); });
  });
#else
  m.def("register_graphs", [] {});
#endif
}

}  // namespace sim
