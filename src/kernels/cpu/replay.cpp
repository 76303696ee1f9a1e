// Calls of ops, recorded once and made again without a word of Python between them (the CPU's CUDA graph), by the caller
// or by a thread that runs such programs one behind another while Python makes the next one ready (its stream).
//
// A program: of each call its op's `_recorded` entry, how many arguments follow, and those.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "abi.h"

namespace motet {
namespace {

void replay(Threads& threads, const int64_t* program, int64_t calls) {
  using Entry = void (*)(Threads*, const int64_t*);
  threads.in_program(true);
  for (int64_t i = 0; i < calls; i++) {
    const int64_t count = program[1];
    argument<Entry>(program[0])(&threads, program + 2);
    program += 2 + count;
  }
  threads.in_program(false);
}

}  // namespace

class Queue {
 public:
  explicit Queue(Threads& threads) : threads_(threads), thread_([this] { serve(); }) {}

  // What was pushed before is run first.
  ~Queue() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // Runs a program behind those pushed before; gives its number, for `wait`. It stays the caller's until it has run.
  int64_t push(const int64_t* program, int64_t calls) {
    std::lock_guard<std::mutex> hold(mutex_);
    waiting_.push_back({program, calls});
    wake_.notify_all();
    return ++pushed_;
  }

  // Until that program and all before it have run.
  void wait(int64_t number) {
    std::unique_lock<std::mutex> hold(mutex_);
    wake_.wait(hold, [&] { return ran_ >= number; });
  }

 private:
  struct Program {
    const int64_t* words;
    int64_t calls;
  };

  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      wake_.wait(hold, [this] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Program program = waiting_.front();
      waiting_.pop_front();
      hold.unlock();
      replay(threads_, program.words, program.calls);
      hold.lock();
      ran_++;
      wake_.notify_all();
    }
  }

  Threads& threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Program> waiting_;
  int64_t pushed_ = 0, ran_ = 0;
  bool closing_ = false;
  std::thread thread_;  // the last member: it begins when all others are there
};

}  // namespace motet

using namespace motet;

MOTET_API void motet_replay(Threads* threads, const int64_t* program, int64_t calls) {
  replay(*threads, program, calls);
}

MOTET_API Queue* motet_queue_new(Threads* threads) { return new Queue(*threads); }
MOTET_API void motet_queue_delete(Queue* queue) { delete queue; }
MOTET_API int64_t motet_queue_push(Queue* queue, const int64_t* program, int64_t calls) {
  return queue->push(program, calls);
}
MOTET_API void motet_queue_wait(Queue* queue, int64_t number) { queue->wait(number); }
