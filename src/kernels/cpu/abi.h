// What the library shows: plain C functions, one per op.
//
// An op takes the threads that share its work, then pointers to the caller's memory, `int64_t` and `float` numbers.
// The caller has checked all shapes; an op writes to its outputs alone and keeps nothing. What may differ between two
// steps of equally many rows reaches it through pointers only, so that a recorded call can be made again.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "threads.h"

#define MOTET_API extern "C" __attribute__((visibility("default")))

// Behind an op's definition: its entry for recorded calls, whose arguments lie in one array (see replay.cpp).
#define MOTET_RECORDABLE(op) \
  MOTET_API void op##_recorded(motet::Threads* threads, const int64_t* args) { motet::call(op, threads, args); }

namespace motet {

// An argument as it lies in the array: pointers by address, floats by the bits of their lower half.
template <class T>
T argument(int64_t word) {
  static_assert(sizeof(T) <= sizeof word);
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <class... P, std::size_t... i>
void call(void (*op)(Threads*, P...), Threads* threads, const int64_t* args, std::index_sequence<i...>) {
  op(threads, argument<P>(args[i])...);
}

template <class... P>
void call(void (*op)(Threads*, P...), Threads* threads, const int64_t* args) {
  call(op, threads, args, std::index_sequence_for<P...>{});
}

}  // namespace motet
