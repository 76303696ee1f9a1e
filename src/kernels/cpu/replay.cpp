// A step's ops, recorded once and called again without a word of Python between them (the CPU's CUDA graph).
#include "abi.h"

using motet::Threads;

// program: of each call its op's `_recorded` entry, how many arguments follow, and those.
MOTET_API void motet_replay(Threads* threads, const int64_t* program, int64_t calls) {
  using Entry = void (*)(Threads*, const int64_t*);
  for (int64_t i = 0; i < calls; i++) {
    const int64_t count = program[1];
    motet::argument<Entry>(program[0])(threads, program + 2);
    program += 2 + count;
  }
}
