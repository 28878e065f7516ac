// What the processor has and the operating system saves: both are needed before a wide register may be used.
#pragma once

namespace deep_offload {

bool cpu_has_avx2();    // AVX2 and F16C
bool cpu_has_avx512();  // AVX-512 F, BW, DQ, VL

// Do multiplications, divisions and square roots of subnormals leave the pipeline for microcode? Intel's do; AMD's take
// a few cycles more, and Arm's none.
bool cpu_assists_subnormals();

}  // namespace deep_offload
