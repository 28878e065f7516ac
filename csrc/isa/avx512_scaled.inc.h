// Scaled: the update of a vector with tiny elements in fp32 lanes, without a subnormal factor or product.
//
// A scaled lane holds 2^149 times its number: what is subnormal becomes an integer below 2^23, an ordinary fp32 number.
// Sums round as they did before. A product below 2^23 is rounded to an integer, once. A plain lane holds its number
// itself, and 0 for one so small that its product might be subnormal: there the other term of its sum is so much
// greater that it does not feel the difference. care.h has the limits that make all this true.
//
// Everything here is a magnitude, but where a sign is named.

// Which lanes are scaled; per lane the smallest normal number, 0 in plain lanes, and 149 in a scaled one's exponent.
struct Lanes {
  __mmask16 scaled;
  __m512 smallest_normal;
  __m512i exponent;
};

inline Lanes scale_lanes(__mmask16 scaled) {
  return {scaled, _mm512_maskz_mov_ps(scaled, _mm512_set1_ps(0x1p23f)),
          _mm512_maskz_mov_epi32(scaled, _mm512_set1_epi32(149 << 23))};
}

inline __mmask16 lanes_below(__m512i bits, uint32_t limit) {
  return _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(static_cast<int>(limit)));
}

// The lanes' numbers; a plain one below `least` becomes 0.
inline __m512 scale(__m512i bits, Lanes lanes, uint32_t least) {
  const __mmask16 kept = lanes.scaled | _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(static_cast<int>(least)));
  const __m512 normal = _mm512_castsi512_ps(_mm512_maskz_add_epi32(kept, bits, lanes.exponent));
  const __mmask16 subnormal = _mm512_mask_cmplt_epu32_mask(lanes.scaled, bits, _mm512_set1_epi32(1 << 23));
  return _mm512_mask_cvtepi32_ps(normal, subnormal, bits);
}

inline __m512i unscale(__m512 number, Lanes lanes) {
  const __m512i normal = _mm512_sub_epi32(_mm512_castps_si512(number), lanes.exponent);
  const __mmask16 subnormal = _mm512_cmp_ps_mask(number, lanes.smallest_normal, _CMP_LT_OQ);
  return _mm512_mask_cvtps_epi32(normal, subnormal, number);
}

// 2^23 has an ULP of 1: fused with its addition, a * b is rounded to an integer, and not before.
inline __m512 product(__m512 a, __m512 b, Lanes lanes) {
  const __m512 normal = _mm512_mul_ps(a, b), shift = _mm512_set1_ps(0x1p23f);
  const __mmask16 subnormal = _mm512_cmp_ps_mask(normal, lanes.smallest_normal, _CMP_LT_OQ);
  return _mm512_mask_sub_ps(normal, subnormal, _mm512_fmadd_ps(a, b, shift), shift);
}
inline __m512 product(__m512 a, float b, Lanes lanes) { return product(a, _mm512_set1_ps(b), lanes); }

// x * x for the lanes `to`, of an x in the lanes `from`: 2^149 is put as 2^74 into one factor and 2^75 into the other.
// Where `from` alone is scaled, v is so much greater that 0 will do.
inline __m512 square(__m512 x, Lanes from, Lanes to) {
  const __m512 from_plain = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), to.scaled, _mm512_set1_ps(0x1p74f));
  const __m512 from_scaled = _mm512_maskz_mov_ps(to.scaled, _mm512_set1_ps(0x1p-75f));
  const __m512 any = _mm512_mul_ps(x, _mm512_mask_mov_ps(from_plain, from.scaled, from_scaled));
  // Below 2^-50 a plain lane's x does not count; a scaled lane's is below 2^-124, and its square 0 anyway.
  const __m512 factor = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(any, _mm512_set1_ps(0x1p-50f), _CMP_GE_OQ), any);
  return product(factor, _mm512_mask_add_ps(factor, to.scaled, factor, factor), to);
}

inline __m512 with_sign(__m512 magnitude, __m512 sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}

// The update with decoupled decay of a vector without huge elements; false, and nothing done, where its bits might be
// wrong: beside a tiny m, p must be great enough. A tiny p would only be slow, and v < 0 is no magnitude.
inline bool update_scaled(Vec& p, Vec& m, Vec& v, Vec g, const AdamScalars& s, const Care& care) {
  if (!care.is_scaled_possible) return false;
  const __m512i m_bits = magnitude(m), v_bits = magnitude(v), g_bits = magnitude(g);
  const Lanes first = scale_lanes(lanes_below(m_bits, care.scaled_exp_avg) & lanes_below(g_bits, care.scaled_grad));
  const Lanes second =
      scale_lanes(lanes_below(v_bits, care.scaled_exp_avg_sq) & lanes_below(g_bits, care.scaled_square));

  const __m512 x = product(scale(g_bits, first, care.least_grad), s.grad_scale, first);
  const __m512 old_m = product(scale(m_bits, first, care.least_moment), s.beta1, first);
  const __m512 sum =
      _mm512_add_ps(with_sign(old_m, m.x), with_sign(product(x, s.one_minus_beta1, first), g.x));
  const __m512i new_bits = unscale(_mm512_abs_ps(sum), first);
  const Vec new_m = {with_sign(_mm512_castsi512_ps(new_bits), sum)};

  // A tiny m is 0 in the quotient; an m that is 0 keeps its sign.
  const __mmask16 tiny = lanes_below(new_bits, care.tiny_exp_avg);
  const int lost = _mm512_mask_cmplt_epu32_mask(_mm512_mask_test_epi32_mask(tiny, new_bits, new_bits), magnitude(p),
                                                _mm512_set1_epi32(static_cast<int>(care.least_master)));
  if ((lost | tiny_lanes(p, care.tiny_state) | _mm512_movepi32_mask(_mm512_castps_si512(v.x))) != 0) return false;
  const Vec dividend = {_mm512_mask_and_ps(new_m.x, tiny, new_m.x, _mm512_set1_ps(-0.0f))};

  const __m512 old_v = product(scale(v_bits, second, care.least_moment), s.beta2, second);
  const __m512 new_v = _mm512_add_ps(old_v, product(square(x, first, second), s.one_minus_beta2, second));
  const __m512 even = _mm512_sqrt_ps(_mm512_mask_add_ps(new_v, second.scaled, new_v, new_v));  // 2^150 times v
  const Vec root = {_mm512_mask_mul_ps(even, second.scaled, even, _mm512_set1_ps(0x1p-75f))};
  const Vec d = add(div(root, Vec::set1(s.sqrt_bias2)), Vec::set1(s.eps));
  p = sub(mul(p, Vec::set1(s.decay)), mul(Vec::set1(s.step_size), div(dividend, d)));
  m = new_m;
  v = {_mm512_castsi512_ps(unscale(new_v, second))};
  return true;
}
