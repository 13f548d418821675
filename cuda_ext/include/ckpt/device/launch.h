// How the code of a kernel runs: on a CUDA device by the threads of a grid of blocks, and in a build with
// CKPT_EMULATE_DEVICE by loops on the host, so that the same code is tested where there is no GPU.
//
// A kernel is a struct: its members are the arguments, `kThreads` is the size of a block, `kBlocks` how many of them a
// multiprocessor should hold at least (what bounds the registers), `Shared` what the threads of a block share, and
// `run(Block<kThreads>, Shared&)` what a block does. All that single threads do stands in steps:
// block.each(step) calls step(number of the thread) for all of them and waits for the last one. What a thread keeps
// from one step to the next is a PerThread. Code outside of steps is the same for all threads.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CKPT_DEVICE __device__ __forceinline__
#define CKPT_PRAGMA(text) _Pragma(#text)
#define CKPT_UNROLL(times) CKPT_PRAGMA(unroll times)
#else
#define CKPT_DEVICE inline
#define CKPT_UNROLL(times)
#endif

namespace ckpt {

// What one load or store can move at most.
struct alignas(16) Vector {
  uint32_t w[4];
};

// One access to device memory. The compiler must be told that it is that, where it finds the pointer in memory.
template <typename T>
CKPT_DEVICE T load(const void* at) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(at));
#endif
  return *static_cast<const T*>(at);
}

template <typename T>
CKPT_DEVICE void store(void* at, const T& value) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(at));
  if constexpr (sizeof(T) == sizeof(Vector)) {  // a struct might be stored word by word
    *static_cast<uint4*>(at) = make_uint4(value.w[0], value.w[1], value.w[2], value.w[3]);
    return;
  }
#endif
  *static_cast<T*>(at) = value;
}

CKPT_DEVICE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Which job a task belongs to: the last one whose first task is not after it.
CKPT_DEVICE int64_t job_of(const int64_t* first_task, int64_t jobs, int64_t task) {
  int64_t low = 0, high = jobs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_task[middle] <= task ? low : high) = middle;
  }
  return low;
}

#if defined(__CUDACC__)

constexpr int64_t kMostBlocks = 1 << 20;  // of a launch; a block takes several tasks where there are more

template <typename T, int kThreads>
class PerThread {
 public:
  __device__ __forceinline__ T& operator[](int) { return value_; }

 private:
  T value_{};
};

template <int kThreads>
struct Block {
  int64_t index, count;

  template <typename Step>
  __device__ __forceinline__ void each(Step step) const {
    step(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) run_kernel(const Kernel kernel) {
  __shared__ typename Kernel::Shared shared;
  kernel.run(Block<Kernel::kThreads>{blockIdx.x, gridDim.x}, shared);
}

template <typename Kernel>
cudaError_t launch(const Kernel& kernel, int64_t blocks, cudaStream_t stream) {
  void* arguments[] = {const_cast<Kernel*>(&kernel)};
  const dim3 grid(static_cast<unsigned>(std::min(blocks, kMostBlocks))), threads(Kernel::kThreads);
  // Not <<<...>>>: its error would have to be told from one that another library left behind.
  return cudaLaunchKernel(reinterpret_cast<const void*>(&run_kernel<Kernel>), grid, threads, arguments, 0, stream);
}

#else

constexpr int64_t kMostBlocks = 5;  // few, so that blocks take several tasks in tests too
constexpr unsigned char kGarbage = 0xA5;

template <typename T, int kThreads>
class PerThread {
 public:
  T& operator[](int thread) { return values_[thread]; }

 private:
  T values_[kThreads]{};
};

template <int kThreads>
struct Block {
  int64_t index, count;

  // In an order that no device has: a step may not depend on any.
  template <typename Step>
  void each(Step step) const {
    static_assert((kThreads & (kThreads - 1)) == 0, "an odd factor makes a permutation of a power of two");
    for (int i = 0; i < kThreads; ++i) step((77 * i + 13) & (kThreads - 1));
  }
};

template <typename Kernel>
cudaError_t launch(const Kernel& kernel, int64_t blocks, cudaStream_t stream) {
  const int64_t count = std::min(blocks, kMostBlocks);
  emulated_enqueue(stream, [=] {
    for (int64_t index = 0; index < count; ++index) {
      typename Kernel::Shared shared;
      std::memset(static_cast<void*>(&shared), kGarbage, sizeof(shared));
      kernel.run(Block<Kernel::kThreads>{index, count}, shared);
    }
  });
  return cudaSuccess;
}

#endif

}  // namespace ckpt
