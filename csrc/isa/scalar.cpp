// One element at a time: the oracle of the others. It stays scalar under any optimization level, see store().
#include <cstdint>

#include "care.h"
#include "elements.h"
#include "isa/isa.h"

namespace deep_offload {
namespace scalar {
namespace {

constexpr int64_t kLanes = 1;

struct Vec {
  float x;
  static Vec set1(float value) { return {value}; }
};
using Wide = Vec;
inline Wide widen(Vec a) { return a; }
inline Vec narrow(Wide a) { return a; }
inline bool needs_care(Vec, Vec, Vec, Vec, const Care&) { return false; }

inline Vec mul(Vec a, Vec b) { return {a.x * b.x}; }
inline Vec add(Vec a, Vec b) { return {a.x + b.x}; }
inline Vec sub(Vec a, Vec b) { return {a.x - b.x}; }
inline Vec div(Vec a, Vec b) { return {a.x / b.x}; }
inline Vec sqrt(Vec a) { return {__builtin_sqrtf(a.x)}; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline float to_float(uint32_t value) { return static_cast<float>(value); }
#include "convert.inc.h"

inline Vec load(const float* from) { return {*from}; }
inline Vec load(const Bf16* from) { return {widen_bf16(uint32_t{from->bits}, 0.0f)}; }
inline Vec load(const Fp16* from) { return {widen_fp16(uint32_t{from->bits}, 0.0f)}; }

// The compiler cannot see through the barrier, so it cannot merge neighboring elements into a vector.
inline void store(float* to, Vec a) {
  *to = a.x;
  __asm__ volatile("" ::: "memory");
}
inline void store(Bf16* to, Vec a) { to->bits = static_cast<uint16_t>(round_bf16(a.x, uint32_t{})); }
inline void store(Fp16* to, Vec a) { to->bits = static_cast<uint16_t>(round_fp16(a.x, uint32_t{})); }
inline void store(NoWeight*, Vec) {}

template <class T>
inline Vec load_n(const T* from, int64_t) {
  return load(from);
}
template <class T>
inline void store_n(T* to, Vec a, int64_t) {
  store(to, a);
}
template <class T>
inline void stream(T* to, Vec a) {
  store(to, a);
}
inline void stream_fence() {}

#include "adam_kernel.inc.h"

bool is_supported() { return true; }

}  // namespace
}  // namespace scalar

const Isa kScalar = {"scalar", scalar::is_supported, scalar::adam<false>, scalar::hold, scalar::pattern};

}  // namespace deep_offload
