// AVX-512 F, BW, DQ, VL: sixteen lanes, partial vectors by mask.
#if defined(__x86_64__)

// GCC's own intrinsics start from deliberately undefined registers and warn about it (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "care.h"
#include "cpu_features.h"
#include "elements.h"
#include "isa/isa.h"

// The target region opens after all includes, so that no inline function of theirs is compiled for AVX-512.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace deep_offload {
namespace avx512 {
namespace {

constexpr int64_t kLanes = 16;

struct Vec {
  __m512 x;
  static inline Vec set1(float value) { return {_mm512_set1_ps(value)}; }
};

inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.x)}; }

// --- Wide: each lane as a double that is an fp32 value. No instruction here meets a subnormal operand or result. ---

// The fp32 value nearest to `value`, ties to even. Adding and taking away 1.5 times the power of two whose ULP in
// double is fp32's ULP at `value` rounds there; below 2^-126 that ULP stays 2^-149. The sign of a zero is put back.
inline __m512d round_half(__m512d value) {
  const __m512d power = _mm512_and_pd(value, _mm512_castsi512_pd(_mm512_set1_epi64(0x7ff0000000000000)));
  const __m512d shift = _mm512_max_pd(_mm512_mul_pd(power, _mm512_set1_pd(0x1.8p29)), _mm512_set1_pd(0x1.8p-97));
  const __m512d rounded = _mm512_sub_pd(_mm512_add_pd(value, shift), shift);
  return _mm512_or_pd(rounded, _mm512_and_pd(value, _mm512_set1_pd(-0.0)));
}

inline __m512d widen_half(__m256i bits) {
  const __mmask8 tiny = _mm256_testn_epi32_mask(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i fraction = _mm256_maskz_and_epi32(tiny, bits, _mm256_set1_epi32(0x007fffff));
  const __m256i kept = _mm256_mask_and_epi32(bits, tiny, bits, _mm256_set1_epi32(INT32_MIN));
  const __m512d below = _mm512_mul_pd(_mm512_cvtepi32_pd(fraction), _mm512_set1_pd(0x1p-149));
  return _mm512_or_pd(_mm512_cvtps_pd(_mm256_castsi256_ps(kept)), below);
}

inline __m256i narrow_half(__m512d value) {
  const __m512d magnitude = _mm512_abs_pd(value);
  const __mmask8 tiny = _mm512_cmp_pd_mask(magnitude, _mm512_set1_pd(0x1p-126), _CMP_LT_OQ);
  const __m512d scaled = _mm512_maskz_mul_pd(tiny, magnitude, _mm512_set1_pd(0x1p149));
  // Tiny lanes keep their sign only, so that the conversion sees a zero there.
  const __m256 kept = _mm512_cvtpd_ps(_mm512_mask_and_pd(value, tiny, value, _mm512_set1_pd(-0.0)));
  return _mm256_or_si256(_mm256_castps_si256(kept), _mm512_cvtpd_epi32(scaled));
}

struct Wide {
  __m512d low, high;
  static inline Wide set1(float value) {
    const __m512d wide = widen_half(_mm256_castps_si256(_mm256_set1_ps(value)));
    return {wide, wide};
  }
};

inline Wide round_both(__m512d low, __m512d high) { return {round_half(low), round_half(high)}; }
inline Wide mul(Wide a, Wide b) { return round_both(_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)); }
inline Wide add(Wide a, Wide b) { return round_both(_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)); }
inline Wide sub(Wide a, Wide b) { return round_both(_mm512_sub_pd(a.low, b.low), _mm512_sub_pd(a.high, b.high)); }
inline Wide div(Wide a, Wide b) { return round_both(_mm512_div_pd(a.low, b.low), _mm512_div_pd(a.high, b.high)); }
inline Wide sqrt(Wide a) { return round_both(_mm512_sqrt_pd(a.low), _mm512_sqrt_pd(a.high)); }

inline Wide widen(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.x);
  return {widen_half(_mm512_castsi512_si256(bits)), widen_half(_mm512_extracti64x4_epi64(bits, 1))};
}
inline Vec narrow(Wide a) {
  const __m512i low = _mm512_castsi256_si512(narrow_half(a.low));
  return {_mm512_castsi512_ps(_mm512_inserti64x4(low, narrow_half(a.high), 1))};
}

inline __m512i magnitude(Vec a) { return _mm512_and_si512(_mm512_castps_si512(a.x), _mm512_set1_epi32(0x7fffffff)); }

// Set where 0 < magnitude < limit, as integers: zero wraps to the largest.
inline __mmask16 tiny_lanes(Vec a, uint32_t limit) {
  const __m512i less_one = _mm512_sub_epi32(magnitude(a), _mm512_set1_epi32(1));
  return _mm512_cmplt_epu32_mask(less_one, _mm512_set1_epi32(static_cast<int>(limit - 1)));
}
inline __mmask16 huge_lanes(Vec a, uint32_t limit) {
  return _mm512_cmpge_epu32_mask(magnitude(a), _mm512_set1_epi32(static_cast<int>(limit)));
}

inline bool needs_care(Vec p, Vec m, Vec v, Vec g, const Care& care) {
  const int tiny = tiny_lanes(p, care.tiny_state) | tiny_lanes(m, care.tiny_exp_avg) |
                   tiny_lanes(v, care.tiny_state) | tiny_lanes(g, care.tiny_grad);
  if (__builtin_expect(tiny == 0, 1) || !care.is_wide_possible) return false;
  const int huge = huge_lanes(p, care.wide_state) | huge_lanes(m, care.wide_state) |
                   huge_lanes(v, care.wide_exp_avg_sq) | huge_lanes(g, care.wide_grad);
  return huge == 0;
}

#include "isa/avx512_scaled.inc.h"

// --- Memory ---

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec widen_bf16(__m256i half) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline Vec widen_fp16(__m256i half) { return {_mm512_cvtph_ps(half)}; }

inline __m256i round_bf16(Vec a) {  // nearest, ties away from zero
  const __m512i bits = _mm512_castps_si512(a.x);
  const __m512i upper = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(upper, nan, kBf16Nan));
}
inline __m256i round_fp16(Vec a) { return _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT); }

inline __m256i load_half(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i load_half_n(const void* from, int64_t n) { return _mm256_maskz_loadu_epi16(first_lanes(n), from); }
inline void store_half(void* to, __m256i half) { _mm256_storeu_si256(static_cast<__m256i*>(to), half); }
inline void store_half_n(void* to, __m256i half, int64_t n) { _mm256_mask_storeu_epi16(to, first_lanes(n), half); }

inline Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Vec load(const Bf16* from) { return widen_bf16(load_half(from)); }
inline Vec load(const Fp16* from) { return widen_fp16(load_half(from)); }
inline Vec load_n(const float* from, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), from)}; }
inline Vec load_n(const Bf16* from, int64_t n) { return widen_bf16(load_half_n(from, n)); }
inline Vec load_n(const Fp16* from, int64_t n) { return widen_fp16(load_half_n(from, n)); }

inline void store(float* to, Vec a) { _mm512_storeu_ps(to, a.x); }
inline void store(Bf16* to, Vec a) { store_half(to, round_bf16(a)); }
inline void store(Fp16* to, Vec a) { store_half(to, round_fp16(a)); }
inline void store(NoWeight*, Vec) {}
inline void store_n(float* to, Vec a, int64_t n) { _mm512_mask_storeu_ps(to, first_lanes(n), a.x); }
inline void store_n(Bf16* to, Vec a, int64_t n) { store_half_n(to, round_bf16(a), n); }
inline void store_n(Fp16* to, Vec a, int64_t n) { store_half_n(to, round_fp16(a), n); }
inline void store_n(NoWeight*, Vec, int64_t) {}
inline void stream(float* to, Vec a) { _mm512_stream_ps(to, a.x); }
inline void stream(Bf16* to, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), round_bf16(a)); }
inline void stream(Fp16* to, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), round_fp16(a)); }
inline void stream(NoWeight*, Vec) {}
inline void stream_fence() { _mm_sfence(); }

#include "adam_kernel.inc.h"

}  // namespace
}  // namespace avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Isa kAvx512 = {"avx512", cpu_has_avx512, avx512::adam<false>, avx512::hold, avx512::pattern};
const Isa kAvx512Wide = {"avx512_wide", cpu_has_avx512, avx512::adam<true>,
                         avx512::hold, avx512::pattern, avx512::count_roads<true>};

}  // namespace deep_offload

#endif  // defined(__x86_64__)
