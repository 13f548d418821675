#include "cuda_runtime.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

namespace {

std::recursive_mutex mutex;
std::deque<std::function<void()>> queue;
cudaError_t last_error = cudaSuccess;
int failing = 0;  // which of the next allocations fails

cudaError_t noted(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

cudaError_t allocate(void** memory, size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *memory = failing > 0 && --failing == 0 ? nullptr : std::malloc(bytes);
  if (*memory == nullptr) return noted(cudaErrorMemoryAllocation);
  std::memset(*memory, 0xA5, bytes);
  return cudaSuccess;
}

cudaError_t wait() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  while (!queue.empty()) {
    const std::function<void()> work = std::move(queue.front());
    queue.pop_front();
    work();
  }
  return cudaSuccess;
}

}  // namespace

void emulated_enqueue(cudaStream_t, std::function<void()> work) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  queue.push_back(std::move(work));
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const cudaError_t found = last_error;
  last_error = cudaSuccess;
  return found;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) { return allocate(memory, bytes); }

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return allocate(memory, bytes); }

cudaError_t cudaFree(void* memory) {
  wait();
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new EmulatedEvent;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->passed = false;
  emulated_enqueue(stream, [=] { event->passed = true; });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return event->passed ? cudaSuccess : noted(cudaErrorNotReady); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return event->passed ? cudaSuccess : wait(); }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  emulated_enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

extern "C" void ckpt_emulated_wait() { wait(); }

extern "C" void ckpt_emulated_fail(int allocation) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  failing = allocation;
}
