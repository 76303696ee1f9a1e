// A few threads that share out the parts of one op at a time; the calling thread works beside them.
#pragma once

#include <algorithm>
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
  // Callers on several threads take turns. A thread that is slow to come, or that the system has put aside, holds up
  // nobody: who is there takes its parts.
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

  // What will be read from memory after the next ops: threads that wait fetch its beginning meanwhile, since memory
  // would rest, too.
  void expect(const void* from, int64_t bytes);

  // Whether ops come one right behind another, as those of a program do.
  void in_program(bool is) { in_program_.store(is, std::memory_order_relaxed); }

 private:
  struct Job {
    void (*call)(const void*, int64_t, int64_t);
    const void* body;
    int64_t first;
  };

  // What is on offer, in one word, so that taking parts and learning that they exist is one act:
  // generation << 40 | parts << 20 | next part.
  static constexpr int64_t kMostParts = (1 << 20) - 1;
  static int64_t next_part(uint64_t offer) { return (int64_t)offer & kMostParts; }
  static int64_t num_parts(uint64_t offer) { return (int64_t)(offer >> 20) & kMostParts; }
  static bool has_part(uint64_t offer) { return next_part(offer) < num_parts(offer); }

  void share(int64_t parts, Job job);
  bool work_some();
  void wait_a_moment();
  void serve();

  std::vector<std::thread> workers_;
  std::mutex turn_;
  Job job_{};
  alignas(64) std::atomic<uint64_t> offer_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<const char*> expected_{nullptr};
  std::atomic<const char*> end_of_expected_{nullptr};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> in_program_{false};
  std::atomic<bool> closing_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Numbers, moved and summed, that are worth a part of their own: one to some microseconds.
constexpr int64_t kLightPart = 1 << 14;

// body(first, last) over all rows of `size` such numbers, several together where they are short.
template <class Body>
void for_row_runs(Threads& threads, int64_t rows, int64_t size, const Body& body) {
  const int64_t step = std::max<int64_t>(1, kLightPart / std::max<int64_t>(1, size));
  threads.run((rows + step - 1) / step,
              [&](int64_t part) { body(part * step, std::min(rows, (part + 1) * step)); });
}

}  // namespace motet
