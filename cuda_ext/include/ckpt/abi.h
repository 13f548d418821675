/* The C interface of the kernels: raw pointers, sizes and strides. Nothing here knows torch or Python. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default) /* all else of the library is hidden, so that two builds can live in a process */
#endif

#define CKPT_ABI 1
#define CKPT_MAX_NDIM 16

/* What a call returns; nothing has been read or written when it is not CKPT_OK. */
enum {
  CKPT_OK = 0,
  CKPT_BAD_NDIM = 1,     /* fewer than 0 or more than CKPT_MAX_NDIM axes */
  CKPT_BAD_ITEMSIZE = 2, /* not 1, 2, 4, 8 or 16 bytes */
  CKPT_BAD_EXTENT = 3,   /* a negative size, or a box that leaves its tensor */
  CKPT_BAD_POINTER = 4,  /* null data of a box that is not empty */
  CKPT_TOO_LARGE = 5,    /* sizes whose product does not fit 62 bits */
  CKPT_OVERLAP = 6,      /* an output whose elements share memory, or that overlaps its input */
  CKPT_BAD_DTYPE = 7,    /* a dtype number that is none of CKPT_FP16 ... CKPT_FP64 */
  CKPT_CUDA_ERROR = 1000 /* plus the number of the CUDA runtime's error */
};

/* A box of a logical tensor in memory: `extent` elements from `offset` on of a tensor of `shape`; the first lies at
   `data`, and `stride` bytes lead from one to the next along each axis (negative ones too). */
typedef struct {
  const void* data;
  int64_t itemsize;
  int32_t ndim;
  int32_t reserved;
  int64_t shape[CKPT_MAX_NDIM];
  int64_t offset[CKPT_MAX_NDIM];
  int64_t extent[CKPT_MAX_NDIM];
  int64_t stride[CKPT_MAX_NDIM];
} ckpt_box;

/* `extent` elements from `src` to `dst`, with byte strides on each side. */
typedef struct {
  void* dst;
  const void* src;
  int64_t itemsize;
  int32_t ndim;
  int32_t reserved;
  int64_t extent[CKPT_MAX_NDIM];
  int64_t dst_stride[CKPT_MAX_NDIM];
  int64_t src_stride[CKPT_MAX_NDIM];
} ckpt_copy;

enum { CKPT_FP16 = 0, CKPT_BF16 = 1, CKPT_FP32 = 2, CKPT_FP64 = 3 };

/* Version of this interface. */
int ckpt_abi(void);

/* Digests of `count` boxes: out[2 * i] and out[2 * i + 1]. At most `threads` threads. */
int ckpt_fingerprint(const ckpt_box* boxes, int64_t count, int threads, uint64_t* out);

/* All copies, at most `threads` threads. Outputs of different copies must not overlap (not checked). */
int ckpt_box_copy(const ckpt_copy* copies, int64_t count, int threads);

/* Sums `leaves` rows of n elements, `leaf_stride` bytes apart, over the fixed binary tree: the first k leaves and the
   rest, k the largest power of two below their number, each summed alike, then left plus right. fp16, bf16 and fp32
   are added in fp32, fp64 in fp64; `out` has n elements of that type. Any NaN becomes the quiet NaN with no payload. */
int ckpt_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, int threads, void* out);

/* Random words of elements first..first+n of a stream: element e is word e mod 4 of Philox 4x32-10 under `key` at
   counter (e / 4 as two words, stream as two words). */
int ckpt_philox(uint32_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key);

/* The same words as uniform fp32 in [0, 1): the top 24 bits times 2^-24. */
int ckpt_philox_uniform(float* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key);

/* 1 where the word is below `threshold` (0 to 2^32), else 0. */
int ckpt_philox_mask(uint8_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, uint64_t threshold);

/* The instruction set in use: 0 scalar, 1 AVX2, 2 AVX-512 IFMA. A limit of 0 or more allows no higher one from now on. */
int ckpt_host_level(int limit);

/* The same on the current CUDA device: data in its memory, on its stream `on` (a cudaStream_t), one launch a call. Only
   ckpt_cuda_fingerprint waits for the stream; its `out` is host memory. It and ckpt_cuda_box_copy cannot be captured
   into a graph. Numbers of tree_sum and philox must be aligned to their size (else CKPT_BAD_POINTER). */
int ckpt_cuda_box_copy(const ckpt_copy* copies, int64_t count, void* on);
int ckpt_cuda_fingerprint(const ckpt_box* boxes, int64_t count, uint64_t* out, void* on);
int ckpt_cuda_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, void* out, void* on);
int ckpt_cuda_philox(uint32_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, void* on);
int ckpt_cuda_philox_uniform(float* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, void* on);
int ckpt_cuda_philox_mask(uint8_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, uint64_t threshold,
                          void* on);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
