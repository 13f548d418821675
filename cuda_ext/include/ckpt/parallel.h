// Threads of a host kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace ckpt {

constexpr double kThreadBytes = 1 << 20;  // of work that make another thread worth while

inline int64_t useful_threads(int threads, double bytes) {
  return static_cast<int64_t>(std::max(1.0, std::min<double>(threads, bytes / kThreadBytes)));
}

// Calls `body` on up to `threads` threads, the caller's among them, and waits for all. The bodies share out the work
// among themselves, so that it is done also where the system grants fewer threads.
template <typename Body>
void on_threads(int64_t threads, Body body) {
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(body);
  } catch (const std::system_error&) {  // no more threads for this process
  }
  body();
  for (auto& other : others) other.join();
}

}  // namespace ckpt
