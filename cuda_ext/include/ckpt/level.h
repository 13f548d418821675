// The instruction sets that the host kernels are compiled for, chosen at run time.
#pragma once

// Whether x86 instructions may be used. CKPT_PORTABLE builds what other machines get, to test it.
#if defined(__x86_64__) && !defined(CKPT_PORTABLE)
#define CKPT_X86 1
#else
#define CKPT_X86 0
#endif

namespace ckpt {

enum { kScalar = 0, kAvx2 = 1, kIfma = 2 };

// The highest one that this machine has and the caller of ckpt_host_level allows.
int host_level();

}  // namespace ckpt
