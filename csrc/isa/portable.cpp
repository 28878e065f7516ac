// Plain C++ with the compilers' vector types: NEON on Arm, SSE2 on x86, whatever the baseline of the build has.
// No fused multiply-add may appear: the whole project is compiled with -ffp-contract=off.
#include <cstddef>
#include <cstdint>

#include "care.h"
#include "elements.h"
#include "isa/isa.h"

namespace deep_offload {
namespace portable {
namespace {

constexpr int64_t kLanes = 4;

using F32x4 = float __attribute__((vector_size(16)));
using U32x4 = uint32_t __attribute__((vector_size(16)));
using U16x4 = uint16_t __attribute__((vector_size(8)));

struct Vec {
  F32x4 x;
  static Vec set1(float value) { return {F32x4{value, value, value, value}}; }
};
// Arm's pipelines take subnormals at full speed, so there is no second road here.
using Wide = Vec;
inline Wide widen(Vec a) { return a; }
inline Vec narrow(Wide a) { return a; }
inline bool needs_care(Vec, Vec, Vec, Vec, const Care&) { return false; }

inline Vec mul(Vec a, Vec b) { return {a.x * b.x}; }
inline Vec add(Vec a, Vec b) { return {a.x + b.x}; }
inline Vec sub(Vec a, Vec b) { return {a.x - b.x}; }
inline Vec div(Vec a, Vec b) { return {a.x / b.x}; }
inline Vec sqrt(Vec a) {
  return {F32x4{__builtin_sqrtf(a.x[0]), __builtin_sqrtf(a.x[1]), __builtin_sqrtf(a.x[2]), __builtin_sqrtf(a.x[3])}};
}

inline U32x4 bits_of(F32x4 value) { return reinterpret_cast<U32x4>(value); }
inline F32x4 float_of(U32x4 bits) { return reinterpret_cast<F32x4>(bits); }
inline F32x4 to_float(U32x4 value) { return __builtin_convertvector(value, F32x4); }
#include "convert.inc.h"

inline U32x4 load_half(const void* from, int64_t n) {
  U16x4 half = {};
  __builtin_memcpy(&half, from, static_cast<size_t>(n) * 2);
  return __builtin_convertvector(half, U32x4);
}
inline void store_half(void* to, U32x4 value, int64_t n) {
  const U16x4 half = __builtin_convertvector(value, U16x4);
  __builtin_memcpy(to, &half, static_cast<size_t>(n) * 2);
}

inline Vec load_n(const float* from, int64_t n) {
  Vec a = {};
  __builtin_memcpy(&a.x, from, static_cast<size_t>(n) * 4);
  return a;
}
inline Vec load_n(const Bf16* from, int64_t n) { return {widen_bf16(load_half(from, n), F32x4{})}; }
inline Vec load_n(const Fp16* from, int64_t n) { return {widen_fp16(load_half(from, n), F32x4{})}; }

inline void store_n(float* to, Vec a, int64_t n) { __builtin_memcpy(to, &a.x, static_cast<size_t>(n) * 4); }
inline void store_n(Bf16* to, Vec a, int64_t n) { store_half(to, round_bf16(a.x, U32x4{}), n); }
inline void store_n(Fp16* to, Vec a, int64_t n) { store_half(to, round_fp16(a.x, U32x4{}), n); }
inline void store_n(NoWeight*, Vec, int64_t) {}

// With a constant length each copy becomes one load or store.
template <class T>
inline Vec load(const T* from) {
  return load_n(from, kLanes);
}
template <class T>
inline void store(T* to, Vec a) {
  store_n(to, a, kLanes);
}
template <class T>
inline void stream(T* to, Vec a) {
  store_n(to, a, kLanes);
}
inline void stream_fence() {}

#include "adam_kernel.inc.h"

bool is_supported() { return true; }

}  // namespace
}  // namespace portable

const Isa kPortable = {"portable", portable::is_supported, portable::adam<false>, portable::hold, portable::pattern};

}  // namespace deep_offload
