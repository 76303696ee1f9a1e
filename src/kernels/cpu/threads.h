// A few threads that share out the parts of one op at a time; the calling thread works beside them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace motet {

class Threads {
 public:
  // `count` threads in all: the caller of `run` is one of them.
  explicit Threads(int count);
  ~Threads();

  int count() const { return (int)workers_.size() + 1; }

  // body(part) for every part in [0, parts), each once, on whichever thread is free; returns when all are done.
  // One caller at a time. A thread that is slow to come, or that the system has put aside, holds up nobody: who
  // is there takes its parts.
  template <class Body>
  void run(int64_t parts, const Body& body) {
    if (parts <= 1 || workers_.empty()) {
      for (int64_t part = 0; part < parts; part++) body(part);
      return;
    }
    for (int64_t first = 0; first < parts; first += kMostParts)
      share(parts - first < kMostParts ? parts - first : kMostParts,
            Job{[](const void* body, int64_t first, int64_t part) {
                  (*static_cast<const Body*>(body))(first + part);
                },
                &body, first});
  }

 private:
  struct Job {
    void (*call)(const void*, int64_t, int64_t);
    const void* body;
    int64_t first;
  };

  // What is on offer, in one word, so that taking a part and learning that it exists is one act:
  // generation << 40 | parts << 20 | next part.
  static constexpr int64_t kMostParts = (1 << 20) - 1;

  void share(int64_t parts, Job job);
  bool work_some();
  void serve();

  std::vector<std::thread> workers_;
  Job job_{};
  alignas(64) std::atomic<uint64_t> offer_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> closing_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace motet
