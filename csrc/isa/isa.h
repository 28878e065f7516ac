// The instruction sets that this build holds. Each file defines one; adam.cpp lists them.
#pragma once

#include "adam.h"

namespace deep_offload {

extern const Isa kScalar;
extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2;
extern const Isa kAvx2Wide;  // *Wide: tiny elements take a road of care.h
extern const Isa kAvx512;
extern const Isa kAvx512Wide;
#endif

}  // namespace deep_offload
