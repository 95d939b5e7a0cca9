// Threads for a CPU kernel: those of the OpenMP runtime that torch has loaded, through its `GOMP_parallel`, or new ones.

#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Run `run(work)` on this many threads, including the caller; if `parallel` is null, threads are started here.
inline void in_threads(void (*run)(void*), void* work, int64_t threads, Parallel parallel) {
  if (threads == 1) return run(work);
  if (parallel != nullptr) return parallel(run, work, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(run, work);
  } catch (const std::system_error&) {
    // Cannot start more threads: the running ones do the work.
  }
  run(work);
  for (std::thread& other : others) other.join();
}

}  // namespace
