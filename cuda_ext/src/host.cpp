#include "ckpt/abi.h"

extern "C" int ckpt_abi(void) { return CKPT_ABI; }
