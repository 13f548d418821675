// Memory for what a call sends to its device and gets back: pinned on the host, and as much of it on the device.
//
// It is kept for the life of the process. A call takes a piece, and gives it back with an event on its stream: until
// that has passed nobody else gets it. So a call need not wait for the device, and what it sends outlives it (the CUDA
// runtime promises for pageable memory neither). Plain cudaMalloc: not every device has memory pools.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

namespace ckpt {

struct Piece {
  int device;
  size_t bytes;
  unsigned char *host, *on_device;
  cudaEvent_t last_use;
};

class Pool {
 public:
  // Never destroyed: at the end of the process CUDA may be gone first.
  static Pool& get() {
    static Pool* const pool = new Pool;
    return *pool;
  }

  cudaError_t take(size_t bytes, Piece* piece) {
    int device = 0;
    if (const cudaError_t status = cudaGetDevice(&device)) return status;
    if (!find(device, bytes, piece)) return make(device, bytes, piece);
    return cudaEventSynchronize(piece->last_use);  // at once, but when very many calls are under way
  }

  void give_back(const Piece& piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pieces_.push_back(piece);
  }

 private:
  static constexpr size_t kLeast = 64 << 10;  // bytes
  static constexpr int kMost = 32;            // pieces of a device that may be large enough and in use before one waits

  // Removes one that is large enough and no longer used, or else the oldest one if there are very many.
  bool find(int device, size_t bytes, Piece* piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto chosen = pieces_.end();
    int fitting = 0;
    for (auto at = pieces_.begin(); at != pieces_.end(); ++at) {
      if (at->device != device || at->bytes < bytes) continue;
      if (fitting++ == 0) chosen = at;
      if (cudaEventQuery(at->last_use) == cudaSuccess) {
        chosen = at;
        fitting = kMost;
        break;
      }
      (void)cudaGetLastError();  // "not ready" is no error, but would be the next caller's
    }
    if (fitting < kMost) return false;
    *piece = *chosen;
    pieces_.erase(chosen);
    return true;
  }

  static cudaError_t make(int device, size_t bytes, Piece* piece) {
    Piece made{device, kLeast, nullptr, nullptr, nullptr};
    while (made.bytes < bytes) made.bytes *= 2;
    cudaError_t status = cudaHostAlloc(reinterpret_cast<void**>(&made.host), made.bytes, cudaHostAllocDefault);
    if (status == cudaSuccess) status = cudaMalloc(reinterpret_cast<void**>(&made.on_device), made.bytes);
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&made.last_use, cudaEventDisableTiming);
    if (status != cudaSuccess) {
      if (made.on_device != nullptr) (void)cudaFree(made.on_device);
      if (made.host != nullptr) (void)cudaFreeHost(made.host);
      (void)cudaGetLastError();  // it is returned: nobody else should find it
      return status;
    }
    *piece = made;
    return cudaSuccess;
  }

  std::mutex mutex_;
  std::vector<Piece> pieces_;  // the one that was given back first comes first
};

// A part of a piece, as the host and as the device see it.
template <typename T>
struct Part {
  T* host;
  T* on_device;
};

// The memory of one call on one stream.
class Scratch {
 public:
  // Room for `bytes` and the gaps between `parts` parts. See `status`.
  Scratch(size_t bytes, size_t parts, cudaStream_t stream) : stream_(stream) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    status = cudaStreamIsCapturing(stream, &capturing);
    // A graph would read this memory whenever it is replayed.
    if (status == cudaSuccess && capturing != cudaStreamCaptureStatusNone) status = cudaErrorStreamCaptureUnsupported;
    if (status == cudaSuccess) status = Pool::get().take(bytes + parts * kAlign, &piece_);
  }

  ~Scratch() {
    if (piece_.host == nullptr) return;
    // Without the event nobody could tell when it is free: then it stays out of use.
    if (cudaEventRecord(piece_.last_use, stream_) == cudaSuccess) Pool::get().give_back(piece_);
  }

  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <typename T>
  Part<T> part(size_t count) {
    const size_t at = used_;
    used_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return {reinterpret_cast<T*>(piece_.host + at), reinterpret_cast<T*>(piece_.on_device + at)};
  }

  template <typename T>
  const T* put(const std::vector<T>& values) {
    const Part<T> room = part<T>(values.size());
    std::copy(values.begin(), values.end(), room.host);
    return room.on_device;
  }

  // Sends all parts so far to the device.
  cudaError_t send() {
    return cudaMemcpyAsync(piece_.on_device, piece_.host, used_, cudaMemcpyHostToDevice, stream_);
  }

  template <typename T>
  cudaError_t fetch(const Part<T>& part, size_t count) {
    const cudaError_t fetched =
        cudaMemcpyAsync(part.host, part.on_device, count * sizeof(T), cudaMemcpyDeviceToHost, stream_);
    return fetched == cudaSuccess ? cudaStreamSynchronize(stream_) : fetched;
  }

  cudaError_t status;

 private:
  static constexpr size_t kAlign = 64;

  cudaStream_t stream_;
  Piece piece_{};
  size_t used_ = 0;
};

}  // namespace ckpt
