// Below which magnitudes an operation of the update may meet or make a subnormal number.
//
// Intel's multiplier, divider and square root hand subnormals to microcode: some 150 cycles each time, five times the
// price of the whole update. Flushing them to zero would change bits. So a vector with a tiny element takes another
// road to the same bits in the *_wide instruction sets (Wide: double precision, rounded after every operation to what fp32 would hold). These limits
// only choose the road: too low, they cost speed; the upper ones keep Wide away from fp32's overflow, infinities and
// NaNs, which it does not imitate.
#pragma once

#include <cstdint>

#include "adam.h"

namespace deep_offload {

struct Care {
  // Bit patterns. An element is tiny when it is not zero and its magnitude, read as an integer, is below tiny_*.
  // A vector may go the wide road when the magnitudes of all its elements are below wide_*.
  uint32_t tiny_grad, tiny_exp_avg, tiny_state;
  uint32_t wide_grad, wide_exp_avg_sq, wide_state;
  bool is_wide_possible;

  explicit Care(const AdamScalars& s)
      : tiny_grad(scaled_limit(0x1p-56f, s.grad_scale)),  // its square times 1 - beta2 >= 2^-14 is a normal number
        tiny_exp_avg(bits_of(0x1p-96f)),                  // times step_size, over a denominator, with room for both
        tiny_state(bits_of(0x1p-124f)),                   // times a factor of at least 1/4
        wide_grad(scaled_limit(0x1p60f, s.grad_scale)),
        wide_exp_avg_sq(bits_of(0x1p120f)),
        wide_state(bits_of(0x1p60f)),
        // m / d < 2^60 / eps, and all other factors near 1: nothing that follows from the limits above overflows.
        is_wide_possible(s.eps >= 0x1p-50f && is_below(s.step_size, 0x1p10f) && is_below(s.decay, 0x1p10f) &&
                         is_below(s.weight_decay_l2, 0x1p10f) && s.sqrt_bias2 >= 0x1p-20f &&
                         is_below(s.grad_scale, 0x1p60f)) {}

 private:
  static uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }

  static bool is_below(float value, float limit) { return -limit < value && value < limit; }

  // The limit before the multiplication by grad_scale; at least the smallest normal number.
  static uint32_t scaled_limit(float limit, float grad_scale) {
    const float scale = grad_scale < 0.0f ? -grad_scale : grad_scale;
    const float unscaled = scale > 0.0f ? limit / scale : 0.0f;
    return bits_of(unscaled > 0x1p-126f ? unscaled : 0x1p-126f);
  }
};

}  // namespace deep_offload
