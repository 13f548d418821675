// The kernels on a CUDA device: what of a call is done on the host. include/ckpt/device/ has what runs on the device.
//
// Compiled as C++ too (CKPT_EMULATE_DEVICE), with emulated/cuda_runtime.h in place of CUDA.
#include <cuda_runtime.h>

#include <vector>

#include "ckpt/abi.h"
#include "ckpt/check.h"
#include "ckpt/device/box_copy.h"
#include "ckpt/device/fingerprint.h"
#include "ckpt/device/philox.h"
#include "ckpt/device/scratch.h"
#include "ckpt/device/tree_sum.h"

namespace ckpt {
namespace {

int outcome(cudaError_t status) { return status == cudaSuccess ? CKPT_OK : CKPT_CUDA_ERROR + static_cast<int>(status); }

cudaStream_t stream_of(void* on) { return static_cast<cudaStream_t>(on); }

// A wrong address would cost the process its device: later calls would fail too.
bool is_aligned(const void* at, int64_t stride, size_t size) {
  return (reinterpret_cast<uintptr_t>(at) | static_cast<uint64_t>(stride)) % size == 0;
}

struct Word {
  CKPT_DEVICE uint32_t operator()(uint32_t w) const { return w; }
};
struct Uniform {
  CKPT_DEVICE float operator()(uint32_t w) const { return uniform(w); }
};
struct Mask {
  uint64_t threshold;
  CKPT_DEVICE uint8_t operator()(uint32_t w) const { return w < threshold; }
};

template <typename T, typename Make>
int generate(T* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, Make make, void* on) {
  if (n < 0) return CKPT_BAD_EXTENT;
  if (static_cast<uint64_t>(n) > UINT64_MAX - first) return CKPT_TOO_LARGE;
  if (n == 0) return CKPT_OK;
  if (out == nullptr || !is_aligned(out, 0, sizeof(T))) return CKPT_BAD_POINTER;
  const PhiloxKernel<T, Make> kernel{out, n, first, stream, key, make};
  return outcome(launch(kernel, kernel.tasks(), stream_of(on)));
}

template <typename In>
int sum_tree(const void* in, int64_t leaves, int64_t n, int64_t stride, void* out, void* on) {
  using T = typename Widened<In>::Type;
  if (!is_aligned(in, leaves == 1 ? 0 : stride, sizeof(In)) || !is_aligned(out, 0, sizeof(T))) return CKPT_BAD_POINTER;
  const auto* from = static_cast<const unsigned char*>(in);
  auto* to = static_cast<T*>(out);
  if (leaves <= int64_t{kGroupLeaves} * kFewGroups) {
    const TreeSumKernel<In, kFewLevels> kernel{from, leaves, n, stride, to};
    return outcome(launch(kernel, kernel.tasks(), stream_of(on)));
  }
  const TreeSumKernel<In, kManyLevels> kernel{from, leaves, n, stride, to};
  return outcome(launch(kernel, kernel.tasks(), stream_of(on)));
}

// All jobs of a call, and the number of the first task of each.
template <typename Job>
struct Jobs {
  std::vector<Job> jobs;
  std::vector<int64_t> first_task;
  int64_t tasks = 0;

  void add(const Job& job) {
    jobs.push_back(job);
    first_task.push_back(tasks);
    tasks += job.tasks();
  }
  int64_t count() const { return static_cast<int64_t>(jobs.size()); }
  size_t bytes() const { return jobs.size() * (sizeof(Job) + sizeof(int64_t)); }
};

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_cuda_box_copy(const ckpt_copy* copies, int64_t count, void* on) {
  using namespace ckpt;
  Jobs<CopyJob> all;
  std::vector<CopyAxis> axes;
  for (int64_t i = 0; i < count; ++i)
    if (const int fault = check_copy(copies[i])) return fault;
  for (int64_t i = 0; i < count; ++i)
    if (!is_empty(copies[i])) all.add(make_copy_job(copies[i], axes));
  if (all.jobs.empty()) return CKPT_OK;

  Scratch scratch(all.bytes() + axes.size() * sizeof(CopyAxis), 3, stream_of(on));
  if (scratch.status != cudaSuccess) return outcome(scratch.status);
  const CopyJob* jobs = scratch.put(all.jobs);
  const int64_t* first_task = scratch.put(all.first_task);
  const BoxCopyKernel kernel{jobs, scratch.put(axes), first_task, all.count(), all.tasks};
  if (const cudaError_t status = scratch.send()) return outcome(status);
  return outcome(launch(kernel, kernel.tasks, stream_of(on)));
}

extern "C" int ckpt_cuda_fingerprint(const ckpt_box* boxes, int64_t count, uint64_t* out, void* on) {
  using namespace ckpt;
  struct Share {  // of a job in the digest of a box
    int64_t box;
    Pair factor;
  };
  for (int64_t i = 0; i < count; ++i)
    if (const int fault = check_box(boxes[i])) return fault;
  Jobs<FpJob> all;
  std::vector<FpRun> runs;
  std::vector<Share> shares;
  std::vector<Pair> total(count, Pair{{0, 0}});
  for (int64_t i = 0; i < count; ++i) {
    if (is_empty(boxes[i])) continue;
    total[i] = ones_of_box(boxes[i]);
    for (const WordBox& words : words_of(boxes[i]))
      for (const Product<FpRun>& part : parts_of(words)) {
        all.add(make_fp_job(part, words.units, runs));
        shares.push_back({i, part.factor});
      }
  }
  if (!all.jobs.empty()) {
    const auto tasks = static_cast<size_t>(all.tasks);
    Scratch scratch(all.bytes() + runs.size() * sizeof(FpRun) + tasks * sizeof(Pair), 4, stream_of(on));
    if (scratch.status != cudaSuccess) return outcome(scratch.status);
    const FpJob* jobs = scratch.put(all.jobs);
    const FpRun* device_runs = scratch.put(runs);
    const int64_t* first_task = scratch.put(all.first_task);
    if (const cudaError_t status = scratch.send()) return outcome(status);
    const Part<Pair> found = scratch.part<Pair>(tasks);
    const FingerprintKernel kernel{jobs, device_runs, first_task, all.count(), all.tasks, found.on_device};
    if (const cudaError_t status = launch(kernel, kernel.tasks, stream_of(on))) return outcome(status);
    if (const cudaError_t status = scratch.fetch(found, tasks)) return outcome(status);
    for (int64_t job = 0; job < all.count(); ++job) {
      Pair sum{{0, 0}};
      for (int64_t task = 0; task < all.jobs[job].tasks(); ++task) sum = sum + found.host[all.first_task[job] + task];
      total[shares[job].box] = total[shares[job].box] + sum * shares[job].factor;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    out[2 * i] = total[i].v[0];
    out[2 * i + 1] = total[i].v[1];
  }
  return CKPT_OK;
}

extern "C" int ckpt_cuda_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, void* out,
                                  void* on) {
  using namespace ckpt;
  if (const int fault = check_tree_sum(in, dtype, leaves, n, leaf_stride, out)) return fault;
  if (n == 0) return CKPT_OK;
  switch (dtype) {
    case CKPT_FP16: return sum_tree<Fp16>(in, leaves, n, leaf_stride, out, on);
    case CKPT_BF16: return sum_tree<Bf16>(in, leaves, n, leaf_stride, out, on);
    case CKPT_FP32: return sum_tree<float>(in, leaves, n, leaf_stride, out, on);
    default: return sum_tree<double>(in, leaves, n, leaf_stride, out, on);
  }
}

extern "C" int ckpt_cuda_philox(uint32_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, void* on) {
  return ckpt::generate(out, n, first, stream, key, ckpt::Word{}, on);
}

extern "C" int ckpt_cuda_philox_uniform(float* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, void* on) {
  return ckpt::generate(out, n, first, stream, key, ckpt::Uniform{}, on);
}

extern "C" int ckpt_cuda_philox_mask(uint8_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key,
                                     uint64_t threshold, void* on) {
  if (threshold > uint64_t{1} << 32) return CKPT_TOO_LARGE;
  return ckpt::generate(out, n, first, stream, key, ckpt::Mask{threshold}, on);
}
