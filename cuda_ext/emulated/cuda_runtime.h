// As much of the CUDA runtime as src/device.cu uses, on the host, for tests: see CKPT_EMULATE_DEVICE in CMakeLists.txt.
//
// "Device" memory is ordinary memory. Work on a stream (there is one queue for all) is done as late as it may be: when
// somebody waits for it. So a test sees when memory is given up or used again too early.
#pragma once

#include <cstddef>
#include <functional>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };
constexpr unsigned cudaEventDisableTiming = 2, cudaHostAllocDefault = 0;

struct EmulatedEvent {
  bool passed = true;
};
using cudaEvent_t = EmulatedEvent*;
using cudaStream_t = struct EmulatedStream*;

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetLastError();
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFree(void* memory);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

// Adds work to the queue.
void emulated_enqueue(cudaStream_t stream, std::function<void()> work);

// For callers from outside: waits for all streams; makes an allocation fail, the next one for 1.
extern "C" __attribute__((visibility("default"))) void ckpt_emulated_wait();
extern "C" __attribute__((visibility("default"))) void ckpt_emulated_fail(int allocation);
