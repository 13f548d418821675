// Checks of what a caller passes, before anything is touched.
#pragma once

#include <initializer_list>

#include "ckpt/abi.h"

namespace ckpt {

constexpr int64_t kMaxProduct = int64_t{1} << 62;

inline int check_box(const ckpt_box& box) {
  if (box.ndim < 0 || box.ndim > CKPT_MAX_NDIM) return CKPT_BAD_NDIM;
  if (box.itemsize < 1 || box.itemsize > 16 || (box.itemsize & (box.itemsize - 1)) != 0) return CKPT_BAD_ITEMSIZE;
  int64_t bytes = box.itemsize;
  for (int i = 0; i < box.ndim; ++i) {
    const int64_t n = box.shape[i], o = box.offset[i], e = box.extent[i];
    if (n < 0 || o < 0 || e < 0 || o > n || e > n - o) return CKPT_BAD_EXTENT;
    if ((e != 0 && bytes > kMaxProduct / e) || n > kMaxProduct) return CKPT_TOO_LARGE;
    const int64_t step = box.stride[i] < 0 ? -box.stride[i] : box.stride[i];
    if (box.stride[i] == INT64_MIN || (e > 1 && step > kMaxProduct / e)) return CKPT_TOO_LARGE;
    bytes *= e;
  }
  return bytes != 0 && box.data == nullptr ? CKPT_BAD_POINTER : CKPT_OK;
}

template <typename Described>
bool is_empty(const Described& what) {
  for (int i = 0; i < what.ndim; ++i)
    if (what.extent[i] == 0) return true;
  return false;
}

inline int check_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, const void* out) {
  constexpr int64_t sizes[] = {2, 2, 4, 8};
  if (dtype < CKPT_FP16 || dtype > CKPT_FP64) return CKPT_BAD_DTYPE;
  if (leaves < 1 || n < 0 || leaf_stride < 0) return CKPT_BAD_EXTENT;
  if (n > kMaxProduct / 16 || (leaf_stride != 0 && leaves > kMaxProduct / 2 / leaf_stride)) return CKPT_TOO_LARGE;
  if (n == 0) return CKPT_OK;
  if (in == nullptr || out == nullptr) return CKPT_BAD_POINTER;
  const auto* a = static_cast<const unsigned char*>(in);
  const auto* b = static_cast<const unsigned char*>(out);
  const int64_t in_bytes = (leaves - 1) * leaf_stride + n * sizes[dtype], out_bytes = n * (dtype == CKPT_FP64 ? 8 : 4);
  return a < b + out_bytes && b < a + in_bytes ? CKPT_OVERLAP : CKPT_OK;
}

// First and past-the-end address that a strided view touches.
inline void span(const unsigned char* at, const ckpt_copy& copy, const int64_t* stride, const unsigned char** lo,
                 const unsigned char** hi) {
  *lo = at;
  *hi = at + copy.itemsize;
  for (int i = 0; i < copy.ndim; ++i) {
    const int64_t reach = (copy.extent[i] - 1) * stride[i];
    (reach < 0 ? *lo : *hi) += reach;
  }
}

// Whether no two elements of the output share memory: each axis, by growing stride, steps past all before it.
inline bool is_disjoint(const ckpt_copy& copy) {
  int order[CKPT_MAX_NDIM], n = 0;
  const auto step = [&](int i) { return copy.dst_stride[i] < 0 ? -copy.dst_stride[i] : copy.dst_stride[i]; };
  for (int i = 0; i < copy.ndim; ++i)
    if (copy.extent[i] > 1) order[n++] = i;
  for (int i = 1; i < n; ++i)
    for (int j = i; j > 0 && step(order[j]) < step(order[j - 1]); --j) {
      const int t = order[j];
      order[j] = order[j - 1];
      order[j - 1] = t;
    }
  int64_t reach = copy.itemsize;
  for (int i = 0; i < n; ++i) {
    if (step(order[i]) < reach) return false;
    reach += step(order[i]) * (copy.extent[order[i]] - 1);
  }
  return true;
}

inline int check_copy(const ckpt_copy& copy) {
  if (copy.ndim < 0 || copy.ndim > CKPT_MAX_NDIM) return CKPT_BAD_NDIM;
  if (copy.itemsize < 1 || copy.itemsize > 16 || (copy.itemsize & (copy.itemsize - 1)) != 0) return CKPT_BAD_ITEMSIZE;
  int64_t bytes = copy.itemsize;
  for (int i = 0; i < copy.ndim; ++i) {
    const int64_t e = copy.extent[i];
    if (e < 0) return CKPT_BAD_EXTENT;
    if (e != 0 && bytes > kMaxProduct / e) return CKPT_TOO_LARGE;
    for (const int64_t s : {copy.dst_stride[i], copy.src_stride[i]}) {
      if (s == INT64_MIN || (e > 1 && (s < 0 ? -s : s) > kMaxProduct / 16 / e)) return CKPT_TOO_LARGE;
    }
    bytes *= e;
  }
  if (bytes == 0) return CKPT_OK;
  if (copy.dst == nullptr || copy.src == nullptr) return CKPT_BAD_POINTER;
  if (!is_disjoint(copy)) return CKPT_OVERLAP;
  const unsigned char *a, *b, *c, *d;
  span(static_cast<const unsigned char*>(copy.dst), copy, copy.dst_stride, &a, &b);
  span(static_cast<const unsigned char*>(copy.src), copy, copy.src_stride, &c, &d);
  return a < d && c < b ? CKPT_OVERLAP : CKPT_OK;
}

}  // namespace ckpt
