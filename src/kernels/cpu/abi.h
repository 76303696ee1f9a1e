// What the library shows: plain C functions, one per op.
//
// An op takes the threads that share its work, then pointers to the caller's memory, `int64_t` and `float` numbers, at
// most 24 in all. The caller has checked all shapes; an op writes to its outputs alone and keeps nothing. What may
// differ between two steps of equally many rows reaches it through pointers only, so that a recorded call can be made
// again.
#pragma once

#include <cstdint>

#include "threads.h"

#define MOTET_API extern "C" __attribute__((visibility("default")))
