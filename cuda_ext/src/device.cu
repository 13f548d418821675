// The kernels on a CUDA device: the same arithmetic from the same headers, one launch for all boxes or copies of a call.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "ckpt/abi.h"
#include "ckpt/box_copy.h"
#include "ckpt/check.h"
#include "ckpt/fingerprint.h"
#include "ckpt/geometry.h"
#include "ckpt/philox.h"
#include "ckpt/tree_sum.h"

namespace ckpt {
namespace {

constexpr int kThreads = 256;

// Memory on the device for the time of a call, on the call's stream.
template <typename T>
class OnDevice {
 public:
  OnDevice(size_t count, cudaStream_t stream) : stream_(stream) {
    status = cudaMallocAsync(reinterpret_cast<void**>(&data), std::max<size_t>(1, count) * sizeof(T), stream);
  }
  OnDevice(const std::vector<T>& from, cudaStream_t stream) : OnDevice(from.size(), stream) {
    if (status == cudaSuccess && !from.empty())
      status = cudaMemcpyAsync(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream);
  }
  ~OnDevice() {
    if (data != nullptr) cudaFreeAsync(data, stream_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data = nullptr;
  cudaError_t status;

 private:
  cudaStream_t stream_;
};

int outcome(cudaError_t status) { return status == cudaSuccess ? CKPT_OK : CKPT_CUDA_ERROR + static_cast<int>(status); }

unsigned grid_for(int64_t work) { return static_cast<unsigned>(std::min<int64_t>(std::max<int64_t>(work, 1), 1 << 20)); }

// Which job a task belongs to: the last one whose first task is not after it.
__device__ int64_t job_of(const int64_t* first_task, int64_t jobs, int64_t task) {
  int64_t low = 0, high = jobs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_task[middle] <= task ? low : high) = middle;
  }
  return low;
}

// ---- box_copy ----

constexpr int64_t kCopyTask = 64 << 10;  // bytes that one block copies at a time

struct CopyJob {
  Runs runs;
  int vector;  // bytes of one load: divides run, strides and addresses
};

template <typename V>
__device__ void copy_elements(const Runs& r, int64_t first, int64_t last) {
  const int64_t per_run = r.run / static_cast<int64_t>(sizeof(V));
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) {
    unsigned char* to;
    const unsigned char* from;
    r.locate(i / per_run, &to, &from);
    reinterpret_cast<V*>(to)[i % per_run] = reinterpret_cast<const V*>(from)[i % per_run];
  }
}

__global__ void box_copy_kernel(const CopyJob* jobs, const int64_t* first_task, int64_t count, int64_t tasks) {
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t number = job_of(first_task, count, task);
    const CopyJob& job = jobs[number];
    const int64_t per_task = kCopyTask / job.vector, all = job.runs.count * (job.runs.run / job.vector);
    const int64_t first = (task - first_task[number]) * per_task, last = min(all, first + per_task);
    switch (job.vector) {
      case 16: copy_elements<uint4>(job.runs, first, last); break;
      case 8: copy_elements<uint2>(job.runs, first, last); break;
      case 4: copy_elements<uint32_t>(job.runs, first, last); break;
      case 2: copy_elements<uint16_t>(job.runs, first, last); break;
      default: copy_elements<uint8_t>(job.runs, first, last); break;
    }
  }
}

int widest_vector(const Runs& r) {
  uint64_t bits = reinterpret_cast<uint64_t>(r.dst) | reinterpret_cast<uint64_t>(r.src) | static_cast<uint64_t>(r.run) | 16;
  for (int i = 0; i < r.ndim; ++i)
    bits |= static_cast<uint64_t>(r.dst_stride[i]) | static_cast<uint64_t>(r.src_stride[i]);
  return static_cast<int>(bits & (~bits + 1));
}

// ---- fingerprint ----

constexpr int kTileRows = 64;     // rows that share one coefficient of a column
constexpr int kTileWords = 1024;  // words of a row in one tile

// Rows and columns of a box: the last axis counts words.
struct FpJob {
  ckpt_box box;
  int unit, per_word;
  int64_t from, to;       // units of the last axis
  int64_t word, words;    // first word of the last axis that is touched, and how many
  int64_t rows;           // over the leading axes
  int64_t tiles_down, tiles_across;
};

__device__ Pair axis_coefficient(int axis, int64_t count, int64_t index) {
  const Pair low = coefficient(axis, 0, index % kDigit);
  return count > kDigit ? low * coefficient(axis, 1, index / kDigit) : low;
}

__device__ Pair row_weight(const FpJob& job, int64_t row, const unsigned char** at) {
  Pair product{{1, 1}};
  *at = static_cast<const unsigned char*>(job.box.data);
  for (int i = job.box.ndim - 2; i >= 0; --i) {
    const int64_t index = row % job.box.extent[i];
    row /= job.box.extent[i];
    *at += index * job.box.stride[i];
    product = product * axis_coefficient(i, job.box.shape[i], job.box.offset[i] + index);
  }
  return product;
}

// Word number `word` of the last axis in a row, with zeros where the box does not reach.
__device__ uint32_t load_word(const FpJob& job, const unsigned char* row, int64_t word) {
  const int64_t step = job.box.stride[job.box.ndim - 1];
  const int64_t a = max(job.from, word * job.per_word), b = min(job.to, (word + 1) * job.per_word);
  const unsigned char* at = row + (a - job.from) * step;
  if (step == job.unit && b - a == job.per_word && (reinterpret_cast<uint64_t>(at) & 3) == 0)
    return *reinterpret_cast<const uint32_t*>(at);
  uint32_t x = 0;
  for (int64_t u = a; u < b; ++u, at += step)
    x |= load_bytes(at, job.unit) << (8 * job.unit * static_cast<int>(u - word * job.per_word));
  return x;
}

// Sum of w * weight without reduction, for fewer than 2^31 terms.
struct Sum {
  uint64_t low = 0, middle = 0, high = 0;
  __device__ void add_product(uint32_t w, uint64_t weight) {
    const uint64_t a = static_cast<uint64_t>(w) * static_cast<uint32_t>(weight);
    const uint64_t b = static_cast<uint64_t>(w) * static_cast<uint32_t>(weight >> 32);
    low += a & 0xFFFFFFFFu;
    middle += (a >> 32) + (b & 0xFFFFFFFFu);
    high += b >> 32;
  }
  __device__ uint64_t value() const {
    return add(add(reduce(low), shifted(reduce(middle), 32)), shifted(reduce(high), 64 - 61));
  }
};

__device__ Pair block_sum(Pair mine) {
  __shared__ Pair parts[kThreads];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < static_cast<unsigned>(half)) parts[threadIdx.x] = parts[threadIdx.x] + parts[threadIdx.x + half];
    __syncthreads();
  }
  const Pair total = parts[0];
  __syncthreads();
  return total;
}

__global__ void fingerprint_kernel(const FpJob* jobs, const int64_t* first_task, int64_t count, int64_t tasks,
                                   unsigned long long* partial) {
  __shared__ Pair weights[kTileRows];
  __shared__ const unsigned char* starts[kTileRows];
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t number = job_of(first_task, count, task);
    const FpJob& job = jobs[number];
    const int64_t tile = task - first_task[number];
    const int64_t row = tile / job.tiles_across * kTileRows, word = tile % job.tiles_across * kTileWords;
    const int rows = static_cast<int>(min(static_cast<int64_t>(kTileRows), job.rows - row));
    const int64_t words = min(static_cast<int64_t>(kTileWords), job.words - word);
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(rows)) weights[threadIdx.x] = row_weight(job, row + threadIdx.x, &starts[threadIdx.x]);
    __syncthreads();
    Pair total{{0, 0}};
    for (int64_t j = threadIdx.x; j < words; j += blockDim.x) {
      Sum sum[2];
      for (int i = 0; i < rows; ++i) {
        const uint32_t w = load_word(job, starts[i], job.word + word + j);
        sum[0].add_product(w, weights[i].v[0]);
        sum[1].add_product(w, weights[i].v[1]);
      }
      const int axis = job.box.ndim - 1;
      const int64_t count_of_words = (job.box.shape[axis] + job.per_word - 1) / job.per_word;
      total = total + Pair{{sum[0].value(), sum[1].value()}} * axis_coefficient(axis, count_of_words, job.word + word + j);
    }
    const Pair found = block_sum(total);
    if (threadIdx.x == 0) {
      partial[2 * task] = found.v[0];
      partial[2 * task + 1] = found.v[1];
    }
  }
}

FpJob make_job(const ckpt_box& box) {
  FpJob job{};
  job.box = box;
  job.unit = static_cast<int>(std::min<int64_t>(box.itemsize, 4));
  job.per_word = 4 / job.unit;
  job.from = box.offset[box.ndim - 1];
  job.to = job.from + box.extent[box.ndim - 1];
  job.word = job.from / job.per_word;
  job.words = (job.to + job.per_word - 1) / job.per_word - job.word;
  job.rows = 1;
  for (int i = 0; i + 1 < box.ndim; ++i) job.rows *= box.extent[i];
  job.tiles_down = (job.rows + kTileRows - 1) / kTileRows;
  job.tiles_across = (job.words + kTileWords - 1) / kTileWords;
  return job;
}

// ---- tree_sum and philox ----

template <typename In, typename T, typename Convert>
__global__ void tree_sum_kernel(const unsigned char* in, int64_t leaves, int64_t n, int64_t stride, T* out, Convert convert) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; j < n; j += step)
    out[j] = tree_sum<T>(leaves, [&](int64_t i) { return convert(reinterpret_cast<const In*>(in + i * stride)[j]); });
}

struct FromFp16 {
  __device__ float operator()(uint16_t x) const { return from_fp16(x); }
};
struct FromBf16 {
  __device__ float operator()(uint16_t x) const { return from_bf16(x); }
};
struct Same {
  template <typename T>
  __device__ T operator()(T x) const {
    return x;
  }
};
struct AsMask {
  uint64_t threshold;
  __device__ uint8_t operator()(uint32_t w) const { return w < threshold; }
};
struct AsUniform {
  __device__ float operator()(uint32_t w) const { return uniform(w); }
};

template <typename T, typename Make>
__global__ void philox_kernel(T* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, Make make) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const uint64_t first_block = first / 4, blocks = (first + n + 3) / 4 - first_block;
  for (uint64_t b = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; b < blocks; b += step) {
    const Words found = philox_block(first_block + b, stream, key);
    for (int q = 0; q < 4; ++q) {
      const uint64_t element = (first_block + b) * 4 + q;
      if (element >= first && element - first < static_cast<uint64_t>(n)) out[element - first] = make(found.w[q]);
    }
  }
}

template <typename T, typename Make>
int generate(T* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, Make make, void* on) {
  if (n < 0) return CKPT_BAD_EXTENT;
  if (static_cast<uint64_t>(n) > UINT64_MAX - 8 - first) return CKPT_TOO_LARGE;
  if (n == 0) return CKPT_OK;
  if (out == nullptr) return CKPT_BAD_POINTER;
  philox_kernel<<<grid_for((n / 4 + kThreads) / kThreads), kThreads, 0, static_cast<cudaStream_t>(on)>>>(out, n, first, stream,
                                                                                                      key, make);
  return outcome(cudaGetLastError());
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_cuda_box_copy(const ckpt_copy* copies, int64_t count, void* on) {
  using namespace ckpt;
  const auto stream = static_cast<cudaStream_t>(on);
  std::vector<CopyJob> jobs;
  std::vector<int64_t> first;
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (const int fault = check_copy(copies[i])) return fault;
    if (is_empty(copies[i])) continue;
    const Runs runs = simplify(copies[i]);
    const int vector = widest_vector(runs);
    jobs.push_back({runs, vector});
    first.push_back(tasks);
    const int64_t elements = runs.count * (runs.run / vector), per_task = kCopyTask / vector;
    tasks += (elements + per_task - 1) / per_task;
  }
  if (jobs.empty()) return CKPT_OK;
  const OnDevice<CopyJob> device_jobs(jobs, stream);
  const OnDevice<int64_t> device_first(first, stream);
  if (device_jobs.status != cudaSuccess) return outcome(device_jobs.status);
  if (device_first.status != cudaSuccess) return outcome(device_first.status);
  box_copy_kernel<<<grid_for(tasks), kThreads, 0, stream>>>(device_jobs.data, device_first.data,
                                                           static_cast<int64_t>(jobs.size()), tasks);
  return outcome(cudaGetLastError());
}

extern "C" int ckpt_cuda_fingerprint(const ckpt_box* boxes, int64_t count, uint64_t* out, void* on) {
  using namespace ckpt;
  const auto stream = static_cast<cudaStream_t>(on);
  struct Part {
    int64_t box;
    Pair factor;
    int64_t first, tasks;
  };
  std::vector<FpJob> jobs;
  std::vector<int64_t> first;
  std::vector<Part> parts;
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (const int fault = check_box(boxes[i])) return fault;
    if (boxes[i].ndim == 0) return CKPT_BAD_NDIM;  // one element: for the host
    out[2 * i] = out[2 * i + 1] = 0;
    if (is_empty(boxes[i])) continue;
    const Pair ones = ones_of_box(boxes[i]);
    out[2 * i] = ones.v[0];
    out[2 * i + 1] = ones.v[1];
    for (int64_t w = 0; w == 0 || 4 * w < boxes[i].itemsize; ++w) {
      ckpt_box plane = boxes[i];
      plane.data = static_cast<const unsigned char*>(plane.data) + 4 * w;
      plane.itemsize = std::min<int64_t>(plane.itemsize, 4);
      const FpJob job = make_job(plane);
      const Pair factor = boxes[i].itemsize > 4 ? coefficient(plane.ndim, 0, w) : Pair{{1, 1}};
      jobs.push_back(job);
      first.push_back(tasks);
      parts.push_back({i, factor, tasks, job.tiles_down * job.tiles_across});
      tasks += job.tiles_down * job.tiles_across;
    }
  }
  if (jobs.empty()) return CKPT_OK;
  const OnDevice<FpJob> device_jobs(jobs, stream);
  const OnDevice<int64_t> device_first(first, stream);
  const OnDevice<unsigned long long> device_partial(2 * static_cast<size_t>(tasks), stream);
  for (const cudaError_t status : {device_jobs.status, device_first.status, device_partial.status})
    if (status != cudaSuccess) return outcome(status);
  fingerprint_kernel<<<grid_for(tasks), kThreads, 0, stream>>>(device_jobs.data, device_first.data,
                                                              static_cast<int64_t>(jobs.size()), tasks, device_partial.data);
  std::vector<unsigned long long> partial(2 * static_cast<size_t>(tasks));
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess)
    status = cudaMemcpyAsync(partial.data(), device_partial.data, partial.size() * sizeof(partial[0]), cudaMemcpyDeviceToHost, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (status != cudaSuccess) return outcome(status);
  for (const Part& part : parts) {
    Pair sum{{0, 0}};
    for (int64_t t = part.first; t < part.first + part.tasks; ++t) sum = sum + Pair{{partial[2 * t], partial[2 * t + 1]}};
    const Pair total = Pair{{out[2 * part.box], out[2 * part.box + 1]}} + sum * part.factor;
    out[2 * part.box] = total.v[0];
    out[2 * part.box + 1] = total.v[1];
  }
  return CKPT_OK;
}

extern "C" int ckpt_cuda_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, void* out, void* on) {
  using namespace ckpt;
  if (const int fault = check_tree_sum(in, dtype, leaves, n, leaf_stride, out)) return fault;
  if (n == 0) return CKPT_OK;
  const auto stream = static_cast<cudaStream_t>(on);
  const auto* from = static_cast<const unsigned char*>(in);
  const unsigned grid = grid_for((n + kThreads - 1) / kThreads);
  auto* narrow = static_cast<float*>(out);
  switch (dtype) {
    case CKPT_FP16: tree_sum_kernel<uint16_t, float><<<grid, kThreads, 0, stream>>>(from, leaves, n, leaf_stride, narrow, FromFp16{}); break;
    case CKPT_BF16: tree_sum_kernel<uint16_t, float><<<grid, kThreads, 0, stream>>>(from, leaves, n, leaf_stride, narrow, FromBf16{}); break;
    case CKPT_FP32: tree_sum_kernel<float, float><<<grid, kThreads, 0, stream>>>(from, leaves, n, leaf_stride, narrow, Same{}); break;
    default: tree_sum_kernel<double, double><<<grid, kThreads, 0, stream>>>(from, leaves, n, leaf_stride, static_cast<double*>(out), Same{}); break;
  }
  return outcome(cudaGetLastError());
}

extern "C" int ckpt_cuda_philox(uint32_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, void* on) {
  return ckpt::generate(out, n, first, stream, key, ckpt::Same{}, on);
}

extern "C" int ckpt_cuda_philox_uniform(float* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, void* on) {
  return ckpt::generate(out, n, first, stream, key, ckpt::AsUniform{}, on);
}

extern "C" int ckpt_cuda_philox_mask(uint8_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, uint64_t threshold,
                                     void* on) {
  if (threshold > uint64_t{1} << 32) return CKPT_TOO_LARGE;
  return ckpt::generate(out, n, first, stream, key, ckpt::AsMask{threshold}, on);
}
