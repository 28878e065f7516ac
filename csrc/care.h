// Below which magnitudes an operation of the update may meet or make a subnormal number.
//
// Intel's multiplier, divider and square root hand subnormals to microcode: some 150 cycles each time, five times the
// price of the whole update. Flushing them to zero would change bits. So a vector with a tiny element takes another
// road to the same bits (Wide: double precision, rounded after every operation to what fp32 would hold). These limits
// only choose the road; set too low they cost speed, never a bit.
#pragma once

#include <cstdint>

#include "adam.h"

namespace deep_offload {

struct Care {
  // Bit patterns: an element is tiny when it is not zero and its magnitude, read as an integer, is below the limit.
  uint32_t grad, exp_avg, exp_avg_sq, master;

  explicit Care(const AdamScalars& s)
      : grad(bits_below(kTinyScaledGrad, s.grad_scale)),
        exp_avg(bits_of(kTinyExpAvg)),
        exp_avg_sq(bits_of(kTinyState)),
        master(bits_of(kTinyState)) {}

 private:
  static constexpr float kSmallestNormal = 0x1p-126f;
  static constexpr float kTinyScaledGrad = 0x1p-56f;  // its square times 1 - beta2 >= 2^-14 is a normal number
  static constexpr float kTinyExpAvg = 0x1p-96f;      // times step_size, over a denominator, with room for both
  static constexpr float kTinyState = 0x1p-124f;      // times a factor of at least 1/4

  static uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }

  // The limit before the multiplication by grad_scale; at least the smallest normal number.
  static uint32_t bits_below(float scaled, float grad_scale) {
    const float scale = grad_scale < 0.0f ? -grad_scale : grad_scale;
    const float limit = scale > 0.0f ? scaled / scale : kSmallestNormal;
    return bits_of(limit > kSmallestNormal ? limit : kSmallestNormal);
  }
};

}  // namespace deep_offload
