#include "threads.h"

#include <chrono>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace motet {

namespace {

// How often a thread looks for the next op of a program, or for the last parts of an op, before it leaves its core to
// others: some 100 µs. A barrier that spins on would halve a neighbour process's speed and ours.
constexpr int kLooks = 1500;

// How often a worker looks for the next op before it sleeps where Python calls them one by one: some 400 µs. A worker that
// slept comes back when the others have done much of the op.
constexpr int kLooksBetweenCalls = 5000;

// Parts are taken several at once while many are left, fewer towards the end (guided self-scheduling, Polychronopoulos
// and Kuck 1987): neighbours lie behind one another in memory, and a thread reads on where it was.
constexpr int64_t kTurns = 2;

// Now and then, between parts, a thread leaves its core to a process that waits for one. Else the system takes it away, as
// likely as not in the middle of a part that the other threads then wait for.
void make_way() {
  using Clock = std::chrono::steady_clock;
  thread_local Clock::time_point next{};
  const Clock::time_point now = Clock::now();
  if (now < next) return;
  std::this_thread::yield();
  next = Clock::now() + std::chrono::milliseconds(1);
}

// Of what is expected: how much of it is fetched, which a second-level cache holds besides what it is for, and how much
// in one moment, after which there may be work again.
constexpr int64_t kMostExpected = 512 << 10;
constexpr int64_t kMoment = 256;
constexpr int64_t kLine = 64;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

Threads::Threads(int count) {
  for (int i = 1; i < count; i++) workers_.emplace_back([this] { serve(); });
}

Threads::~Threads() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Threads::expect(const void* from, int64_t bytes) {
  const char* at = static_cast<const char*>(from);
  end_of_expected_.store(at + std::min(bytes, kMostExpected), std::memory_order_relaxed);
  expected_.store(at, std::memory_order_relaxed);
}

// Which of the two numbers another thread sees first does not matter: what is fetched in vain does no harm.
void Threads::wait_a_moment() {
  const char* const end = end_of_expected_.load(std::memory_order_relaxed);
  if (expected_.load(std::memory_order_relaxed) >= end) return pause();
  const char* at = expected_.fetch_add(kMoment, std::memory_order_relaxed);
  for (int64_t i = 0; i < kMoment; i += kLine) __builtin_prefetch(at + i, 0, 2);
}

bool Threads::work_some() {
  uint64_t offer = offer_.load(std::memory_order_acquire);
  int64_t taken;
  do {
    if (!has_part(offer)) return false;
    taken = std::max<int64_t>(1, (num_parts(offer) - next_part(offer)) / (kTurns * count()));
  } while (!offer_.compare_exchange_weak(offer, offer + (uint64_t)taken, std::memory_order_acq_rel,
                                         std::memory_order_acquire));
  // The job stands still until these parts are done.
  for (int64_t part = next_part(offer); part < next_part(offer) + taken; part++) job_.call(job_.body, job_.first, part);
  done_.fetch_add(taken, std::memory_order_release);
  make_way();
  return true;
}

void Threads::share(int64_t parts, Job job) {
  std::lock_guard<std::mutex> turn(turn_);
  job_ = job;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t generation = (offer_.load(std::memory_order_relaxed) >> 40) + 1;
  offer_.store(generation << 40 | (uint64_t)parts << 20, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> hold(mutex_); }
    wake_.notify_all();
  }
  while (work_some()) {
  }
  for (int looks = 0; done_.load(std::memory_order_acquire) < parts; looks++) {
    if (looks < kLooks)
      wait_a_moment();
    else
      std::this_thread::yield();  // whoever has the last part may wait for this very core
  }
}

void Threads::serve() {
  for (;;) {
    for (int looks = kLooks; looks > 0; looks--) {
      if (work_some())
        looks = in_program_.load(std::memory_order_relaxed) ? kLooks : kLooksBetweenCalls;
      else
        wait_a_moment();
    }
    std::unique_lock<std::mutex> hold(mutex_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(hold, [this] { return closing_ || has_part(offer_.load(std::memory_order_seq_cst)); });
    asleep_.fetch_sub(1, std::memory_order_relaxed);
    if (closing_) return;
  }
}

}  // namespace motet

using motet::Threads;

MOTET_API Threads* motet_threads_new(int count) { return new Threads(count); }
MOTET_API void motet_threads_delete(Threads* threads) { delete threads; }

MOTET_API void motet_expect(Threads* threads, const void* from, int64_t bytes) { threads->expect(from, bytes); }
MOTET_RECORDABLE(motet_expect)
