// What the processor has and the operating system saves: both are needed before a wide register may be used.
#pragma once

namespace deep_offload {

bool cpu_has_avx2();    // AVX2 and F16C
bool cpu_has_avx512();  // AVX-512 F, BW, DQ, VL

}  // namespace deep_offload
