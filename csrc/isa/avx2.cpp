// AVX2 with F16C: eight lanes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "care.h"
#include "cpu_features.h"
#include "elements.h"
#include "isa/isa.h"

// The target region opens after all includes, so that no inline function of theirs is compiled for AVX2.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

namespace deep_offload {
namespace avx2 {
namespace {

constexpr int64_t kLanes = 8;

struct Vec {
  __m256 x;
  static inline Vec set1(float value) { return {_mm256_set1_ps(value)}; }
};

inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.x)}; }

// --- Wide: each lane as a double that is an fp32 value. No instruction here meets a subnormal operand or result. ---

// The fp32 value nearest to `value`, ties to even. Adding and taking away 1.5 times the power of two whose ULP in
// double is fp32's ULP at `value` rounds there; below 2^-126 that ULP stays 2^-149. The sign of a zero is put back.
inline __m256d round_half(__m256d value) {
  const __m256d power = _mm256_and_pd(value, _mm256_castsi256_pd(_mm256_set1_epi64x(0x7ff0000000000000)));
  const __m256d shift = _mm256_max_pd(_mm256_mul_pd(power, _mm256_set1_pd(0x1.8p29)), _mm256_set1_pd(0x1.8p-97));
  const __m256d rounded = _mm256_sub_pd(_mm256_add_pd(value, shift), shift);
  return _mm256_or_pd(rounded, _mm256_and_pd(value, _mm256_set1_pd(-0.0)));
}

inline __m256d widen_half(__m128i bits) {
  const __m128i exponent = _mm_and_si128(bits, _mm_set1_epi32(0x7f800000));
  const __m128i tiny = _mm_cmpeq_epi32(exponent, _mm_setzero_si128());
  const __m128i fraction = _mm_and_si128(tiny, _mm_and_si128(bits, _mm_set1_epi32(0x007fffff)));
  const __m128i kept = _mm_andnot_si128(_mm_and_si128(tiny, _mm_set1_epi32(0x7fffffff)), bits);
  const __m256d below = _mm256_mul_pd(_mm256_cvtepi32_pd(fraction), _mm256_set1_pd(0x1p-149));
  return _mm256_or_pd(_mm256_cvtps_pd(_mm_castsi128_ps(kept)), below);
}

inline __m128i narrow_half(__m256d value) {
  const __m256d sign_bit = _mm256_set1_pd(-0.0);
  const __m256d magnitude = _mm256_andnot_pd(sign_bit, value);
  const __m256d tiny = _mm256_cmp_pd(magnitude, _mm256_set1_pd(0x1p-126), _CMP_LT_OQ);
  const __m256d scaled = _mm256_mul_pd(_mm256_and_pd(tiny, magnitude), _mm256_set1_pd(0x1p149));
  const __m256d kept = _mm256_andnot_pd(_mm256_andnot_pd(sign_bit, tiny), value);
  return _mm_or_si128(_mm_castps_si128(_mm256_cvtpd_ps(kept)), _mm256_cvtpd_epi32(scaled));
}

struct Wide {
  __m256d low, high;
  static inline Wide set1(float value) {
    const __m256d wide = widen_half(_mm_castps_si128(_mm_set1_ps(value)));
    return {wide, wide};
  }
};

inline Wide round_both(__m256d low, __m256d high) { return {round_half(low), round_half(high)}; }
inline Wide mul(Wide a, Wide b) { return round_both(_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)); }
inline Wide add(Wide a, Wide b) { return round_both(_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)); }
inline Wide sub(Wide a, Wide b) { return round_both(_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)); }
inline Wide div(Wide a, Wide b) { return round_both(_mm256_div_pd(a.low, b.low), _mm256_div_pd(a.high, b.high)); }
inline Wide sqrt(Wide a) { return round_both(_mm256_sqrt_pd(a.low), _mm256_sqrt_pd(a.high)); }

inline Wide widen(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.x);
  return {widen_half(_mm256_castsi256_si128(bits)), widen_half(_mm256_extracti128_si256(bits, 1))};
}
inline Vec narrow(Wide a) {
  return {_mm256_castsi256_ps(_mm256_set_m128i(narrow_half(a.high), narrow_half(a.low)))};
}

inline __m256i magnitude(Vec a) { return _mm256_and_si256(_mm256_castps_si256(a.x), _mm256_set1_epi32(0x7fffffff)); }

// All ones where 0 < magnitude < limit, as integers: zero wraps to the largest.
inline __m256i tiny_lanes(Vec a, uint32_t limit) {
  const __m256i less_one = _mm256_sub_epi32(magnitude(a), _mm256_set1_epi32(1));
  const __m256i most = _mm256_set1_epi32(static_cast<int>(limit - 2));
  return _mm256_cmpeq_epi32(_mm256_min_epu32(less_one, most), less_one);
}
inline __m256i huge_lanes(Vec a, uint32_t limit) {
  return _mm256_cmpgt_epi32(magnitude(a), _mm256_set1_epi32(static_cast<int>(limit - 1)));
}

inline bool needs_care(Vec p, Vec m, Vec v, Vec g, const Care& care) {
  const __m256i tiny = _mm256_or_si256(
      _mm256_or_si256(tiny_lanes(p, care.tiny_state), tiny_lanes(m, care.tiny_exp_avg)),
      _mm256_or_si256(tiny_lanes(v, care.tiny_state), tiny_lanes(g, care.tiny_grad)));
  if (__builtin_expect(_mm256_testz_si256(tiny, tiny), 1) || !care.is_wide_possible) return false;
  const __m256i huge = _mm256_or_si256(
      _mm256_or_si256(huge_lanes(p, care.wide_state), huge_lanes(m, care.wide_state)),
      _mm256_or_si256(huge_lanes(v, care.wide_exp_avg_sq), huge_lanes(g, care.wide_grad)));
  return _mm256_testz_si256(huge, huge);
}

// --- Memory. Partial vectors of 16 bits go through the stack: AVX2 has no masked access to them. ---

inline __m256i first_lanes(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}

inline __m128i load_half(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline __m128i load_half_n(const void* from, int64_t n) {
  uint16_t lanes[kLanes] = {};
  __builtin_memcpy(lanes, from, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_half(lanes);
}
inline void store_half(void* to, __m128i half) { _mm_storeu_si128(static_cast<__m128i*>(to), half); }
inline void store_half_n(void* to, __m128i half, int64_t n) {
  uint16_t lanes[kLanes];
  store_half(lanes, half);
  __builtin_memcpy(to, lanes, static_cast<size_t>(n) * sizeof(uint16_t));
}

inline Vec widen_bf16(__m128i half) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline Vec widen_fp16(__m128i half) { return {_mm256_cvtph_ps(half)}; }

inline __m128i round_bf16(Vec a) {  // nearest, ties away from zero
  const __m256i bits = _mm256_castps_si256(a.x);
  const __m256i upper = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q));
  const __m256i safe = _mm256_blendv_epi8(upper, _mm256_set1_epi32(kBf16Nan), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(safe), _mm256_extracti128_si256(safe, 1));
}
inline __m128i round_fp16(Vec a) { return _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT); }

inline Vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline Vec load(const Bf16* from) { return widen_bf16(load_half(from)); }
inline Vec load(const Fp16* from) { return widen_fp16(load_half(from)); }
inline Vec load_n(const float* from, int64_t n) { return {_mm256_maskload_ps(from, first_lanes(n))}; }
inline Vec load_n(const Bf16* from, int64_t n) { return widen_bf16(load_half_n(from, n)); }
inline Vec load_n(const Fp16* from, int64_t n) { return widen_fp16(load_half_n(from, n)); }

inline void store(float* to, Vec a) { _mm256_storeu_ps(to, a.x); }
inline void store(Bf16* to, Vec a) { store_half(to, round_bf16(a)); }
inline void store(Fp16* to, Vec a) { store_half(to, round_fp16(a)); }
inline void store(NoWeight*, Vec) {}
inline void store_n(float* to, Vec a, int64_t n) { _mm256_maskstore_ps(to, first_lanes(n), a.x); }
inline void store_n(Bf16* to, Vec a, int64_t n) { store_half_n(to, round_bf16(a), n); }
inline void store_n(Fp16* to, Vec a, int64_t n) { store_half_n(to, round_fp16(a), n); }
inline void store_n(NoWeight*, Vec, int64_t) {}
inline void stream(float* to, Vec a) { _mm256_stream_ps(to, a.x); }
inline void stream(Bf16* to, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), round_bf16(a)); }
inline void stream(Fp16* to, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), round_fp16(a)); }
inline void stream(NoWeight*, Vec) {}
inline void stream_fence() { _mm_sfence(); }

#include "adam_kernel.inc.h"

}  // namespace
}  // namespace avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Isa kAvx2 = {"avx2", cpu_has_avx2, avx2::adam<false>, avx2::hold, avx2::pattern};
const Isa kAvx2Wide = {"avx2_wide", cpu_has_avx2, avx2::adam<true>,
                       avx2::hold, avx2::pattern, avx2::count_roads<true>};

}  // namespace deep_offload

#endif  // defined(__x86_64__)
