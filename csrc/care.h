// Below which magnitudes an operation of the update may meet or make a subnormal number.
//
// Intel's multiplier, divider and square root hand subnormals to microcode: some 150 cycles each time, five times the
// price of the whole update. Flushing them to zero would change bits. So the *_wide instruction sets send a vector with
// a tiny element over another road to the same bits: Scaled where the set has it (fp32 lanes, isa/avx512_scaled.inc.h)
// and it can, else Wide (double precision, rounded after every operation to what fp32 would hold).
#pragma once

#include <cstdint>

#include "adam.h"

namespace deep_offload {

struct Care {
  // All limits are bit patterns, compared with magnitudes as integers. An element is tiny when it is not zero and below
  // tiny_*; too low, that costs speed only. A vector may leave the plain road when all its elements are below wide_*:
  // neither road imitates fp32's overflow, infinities and NaNs.
  uint32_t tiny_grad, tiny_exp_avg, tiny_state;
  uint32_t wide_grad, wide_exp_avg_sq, wide_state;
  bool is_wide_possible;

  // Scaled. A lane computes m scaled where m < 2^-60 and x < 2^-60, and v where v < 2^-40 and x < 2^-20: nothing
  // overflows there, though a scaled number has 2^149 times less room. In the other, plain lanes one term of the sum is
  // at least 2^-60 (for v 2^-40, of v or of x * x), and after its factor, 2^-16 or more, at least 2^-76 (2^-56). Its
  // neighbors are 2^-100 (2^-80) away or more, and what is less than half of that does not count: m, x and v below
  // 2^-104, x * x below 2^-100. What does count stays above 2^-126 through its factor.
  uint32_t scaled_exp_avg, scaled_grad, scaled_exp_avg_sq, scaled_square;
  uint32_t least_moment, least_grad;
  // From here on, p * decay does not feel m < 2^-96: step_size * m / eps is less than 2^-26 of it, so less than half of
  // the way to its nearer neighbor. 2^-100 is for the rounding of a subnormal quotient, up to 2^-150 times step_size.
  uint32_t least_master;
  bool is_scaled_possible;

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
                         is_below(s.grad_scale, 0x1p60f)),
        scaled_exp_avg(bits_of(0x1p-60f)),
        scaled_grad(scaled_limit(0x1p-60f, s.grad_scale)),
        scaled_exp_avg_sq(bits_of(0x1p-40f)),
        scaled_square(scaled_limit(0x1p-20f, s.grad_scale)),
        least_moment(bits_of(0x1p-104f)),
        least_grad(scaled_limit(0x1p-104f, s.grad_scale)),
        least_master(bits_of(0x1p-68f * (s.step_size < 0.0f ? -s.step_size : s.step_size) / s.eps + 0x1p-100f)),
        // grad_scale leaves least_grad at 2^-124 or more, a normal number, and scaled_grad at 2^-30 or less.
        is_scaled_possible(is_wide_possible && is_factor(s.beta1) && is_factor(s.one_minus_beta1) &&
                           is_factor(s.beta2) && is_factor(s.one_minus_beta2) && 0.5f <= s.decay && s.decay <= 2.0f &&
                           0x1p-30f <= s.grad_scale && s.grad_scale <= 0x1p20f) {}

 private:
  static uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }

  static bool is_below(float value, float limit) { return -limit < value && value < limit; }
  static bool is_factor(float value) { return 0x1p-16f <= value && value <= 1.0f; }

  // The limit before the multiplication by grad_scale; at least the smallest normal number.
  static uint32_t scaled_limit(float limit, float grad_scale) {
    const float scale = grad_scale < 0.0f ? -grad_scale : grad_scale;
    const float unscaled = scale > 0.0f ? limit / scale : 0.0f;
    return bits_of(unscaled > 0x1p-126f ? unscaled : 0x1p-126f);
  }
};

}  // namespace deep_offload
