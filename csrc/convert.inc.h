// 16-bit conversions in integer arithmetic, for lanes of any width: U is uint32_t with F float, or vectors of both.
// Included inside the namespace of an instruction set, after its bits_of(F) -> U, float_of(U) -> F and to_float(U) -> F
// (value conversion). Sets with conversion instructions do not need it. No branch on a lane, so it vectorises.

// bf16: nearest, ties away from zero. The carry out of the mantissa is the right one; only a NaN needs care.
template <class F, class U>
inline U round_bf16(F value, U) {
  const U bits = bits_of(value);
  return ((bits & 0x7fffffffu) > 0x7f800000u) ? U{} + kBf16Nan : (bits + 0x8000u) >> 16;
}

template <class F, class U>
inline F widen_bf16(U half, F) {
  return float_of(half << 16);
}

// fp16: nearest, ties to even.
template <class F, class U>
inline U round_fp16(F value, U) {
  const U bits = bits_of(value);
  const U magnitude = bits & 0x7fffffffu;
  const U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;  // rebias, round half to even
  // Below 2^-14: an ULP of 0.5 is 2^-24, the spacing of fp16's subnormals, so the addition rounds for us.
  const U subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  U half = (magnitude < 0x38800000u) ? subnormal : normal;
  half = (magnitude >= 0x47800000u) ? U{} + 0x7c00u : half;  // 2^16 and more, infinity
  half = (magnitude > 0x7f800000u) ? U{} + 0x7e00u : half;   // NaN
  return half | ((bits >> 16) & 0x8000u);
}

template <class F, class U>
inline F widen_fp16(U half, F) {
  const U magnitude = half & 0x7fffu;
  const U normal = (magnitude << 13) + (112u << 23);
  const U special = (magnitude << 13) + (224u << 23);                    // infinity and NaN
  const U subnormal = bits_of(to_float(magnitude) * 0x1p-24f);           // exact, and normal in fp32
  U bits = (magnitude < 0x400u) ? subnormal : normal;
  bits = (magnitude >= 0x7c00u) ? special : bits;
  return float_of(bits | ((half & 0x8000u) << 16));
}
