// THE arithmetic, once, and the loop around it. Each instruction set includes this file inside its own namespace (and
// target region) after defining, for T in float, Bf16, Fp16 (and, for stores, NoWeight):
//
//   Vec, kLanes                                    fp32 lanes
//   Wide, widen(Vec) -> Wide, narrow(Wide) -> Vec  the same lanes where subnormals cost no microcode assist, or Vec
//   V::set1(float), mul, add, sub, div, sqrt       one IEEE rounding each, on Vec and on Wide
//   load(const T*), load_n(const T*, n)            n < kLanes elements, the other lanes 0
//   store(T*, Vec), store_n(T*, Vec, n), stream(T*, Vec), stream_fence()
//   needs_care(p, m, v, g, Care) -> bool           should this vector leave the plain road? Never changes a bit.
//   update_scaled(p, m, v, g, AdamScalars, Care)   if it has one: a quicker road than Wide; false where it cannot go
//
// No standard library templates in here: an AVX-512 copy of one could be kept for the whole program.

// Chosen for sets that define no road between the plain one and Wide.
template <class V>
inline bool update_scaled(V&, V&, V&, V, const AdamScalars&, const Care&) {
  return false;
}

// kTakesCare: vectors with tiny elements go through Scaled or Wide. Returns the road taken.
template <bool kDecoupled, bool kTakesCare>
struct Adam {
  const AdamScalars& s;
  const Care care;

  template <class V>
  static inline void update(V& p, V& m, V& v, V g, const AdamScalars& s) {
    V x = mul(g, V::set1(s.grad_scale));
    if (!kDecoupled) x = add(x, mul(V::set1(s.weight_decay_l2), p));
    m = add(mul(V::set1(s.beta1), m), mul(V::set1(s.one_minus_beta1), x));
    v = add(mul(V::set1(s.beta2), v), mul(V::set1(s.one_minus_beta2), mul(x, x)));
    const V d = add(div(sqrt(v), V::set1(s.sqrt_bias2)), V::set1(s.eps));
    p = sub(mul(p, V::set1(s.decay)), mul(V::set1(s.step_size), div(m, d)));
  }

  inline Road operator()(Vec& p, Vec& m, Vec& v, Vec g) const {
    if (kTakesCare && __builtin_expect(needs_care(p, m, v, g, care), 0)) {
      if (kDecoupled && update_scaled(p, m, v, g, s, care)) return Road::kScaled;
      Wide wp = widen(p), wm = widen(m), wv = widen(v);
      update<Wide>(wp, wm, wv, widen(g), s);
      p = narrow(wp), m = narrow(wm), v = narrow(wv);
      return Road::kWide;
    }
    update<Vec>(p, m, v, g, s);
    return Road::kPlain;
  }
};

// The same, and how many vectors took each road.
template <class Rule>
struct Counting {
  const Rule& rule;
  int64_t* vectors;

  inline void operator()(Vec& p, Vec& m, Vec& v, Vec g) const { ++vectors[static_cast<int>(rule(p, m, v, g))]; }
};

// The same traffic without arithmetic: every value read is written somewhere, so no load or store can be dropped.
struct Pattern {
  inline void operator()(Vec& p, Vec& m, Vec& v, Vec g) const {
    p = m, m = v, v = g;
  }
};

// Ways to reach the elements at an address: a full vector, the same with a streaming store, the first n lanes.
struct Full {
  template <class T>
  Vec get(const T* from) const {
    return load(from);
  }
  template <class T>
  void put(T* to, Vec value) const {
    store(to, value);
  }
  template <class T>
  void put_weight(T* to, Vec value) const {
    store(to, value);
  }
};
struct FullStreaming : Full {
  template <class T>
  void put_weight(T* to, Vec value) const {
    stream(to, value);
  }
};
struct Partial {
  int64_t n;
  template <class T>
  Vec get(const T* from) const {
    return load_n(from, n);
  }
  template <class T>
  void put(T* to, Vec value) const {
    store_n(to, value, n);
  }
  template <class T>
  void put_weight(T* to, Vec value) const {
    store_n(to, value, n);
  }
};

template <class Rule, class Grad, class Weight>
struct UpdateAll {
  const Rule& rule;
  float *master, *exp_avg, *exp_avg_sq;
  const Grad* grad;
  Weight* weight;

  template <class Access>
  inline void step(int64_t i, Access access) const {
    Vec p = access.get(master + i), m = access.get(exp_avg + i), v = access.get(exp_avg_sq + i);
    const Vec g = access.get(grad + i);
    rule(p, m, v, g);
    access.put(master + i, p);
    access.put(exp_avg + i, m);
    access.put(exp_avg_sq + i, v);
    access.put_weight(weight + i, p);
  }
};

template <class Weight>
struct RoundOnly {
  const float* master;
  Weight* weight;

  template <class Access>
  inline void step(int64_t i, Access access) const {
    access.put_weight(weight + i, access.get(master + i));
  }
};

// Run `body` over [begin, end): vectors, and partial vectors at the ends. Where the weight streams, a partial vector
// first brings it to the alignment that streaming stores need.
template <class Body>
inline void run_range(const Body& body, int64_t begin, int64_t end, bool streams, const void* weight, int64_t width) {
  int64_t i = begin;
  if (streams) {
    const int64_t address = reinterpret_cast<intptr_t>(weight) / width + begin;
    int64_t head = (kLanes - address % kLanes) % kLanes;
    if (head > end - begin) head = end - begin;
    if (head != 0) body.step(i, Partial{head});
    i += head;
    for (; i + kLanes <= end; i += kLanes) body.step(i, FullStreaming{});
    stream_fence();
  } else {
    for (; i + kLanes <= end; i += kLanes) body.step(i, Full{});
  }
  if (i < end) body.step(i, Partial{end - i});
}

template <class Rule, class Grad, class Weight>
void update_range(const AdamArrays& a, int64_t begin, int64_t end, const Rule& rule) {
  const UpdateAll<Rule, Grad, Weight> body{rule, a.master, a.exp_avg, a.exp_avg_sq, static_cast<const Grad*>(a.grad),
                                           static_cast<Weight*>(a.weight)};
  // A weight that lies over its gradient is in the cache already; streaming it would evict what comes next.
  const bool streams = a.weight != nullptr && a.weight != a.grad;
  run_range(body, begin, end, streams, a.weight, sizeof(Weight));
}

template <class Rule, class Grad>
void update_by_weight(const AdamArrays& a, int64_t begin, int64_t end, const Rule& rule) {
  switch (a.weight_dtype) {
    case Dtype::kNone: return update_range<Rule, Grad, NoWeight>(a, begin, end, rule);
    case Dtype::kFloat32: return update_range<Rule, Grad, float>(a, begin, end, rule);
    case Dtype::kBfloat16: return update_range<Rule, Grad, Bf16>(a, begin, end, rule);
    case Dtype::kFloat16: return update_range<Rule, Grad, Fp16>(a, begin, end, rule);
  }
}

template <class Rule>
void update_by_grad(const AdamArrays& a, int64_t begin, int64_t end, const Rule& rule) {
  switch (a.grad_dtype) {
    case Dtype::kNone: return;
    case Dtype::kFloat32: return update_by_weight<Rule, float>(a, begin, end, rule);
    case Dtype::kBfloat16: return update_by_weight<Rule, Bf16>(a, begin, end, rule);
    case Dtype::kFloat16: return update_by_weight<Rule, Fp16>(a, begin, end, rule);
  }
}

template <bool kTakesCare>
void adam(const AdamArrays& a, int64_t begin, int64_t end, const AdamScalars& s, bool decoupled) {
  const Care care(s);
  if (decoupled) {
    update_by_grad(a, begin, end, Adam<true, kTakesCare>{s, care});
  } else {
    update_by_grad(a, begin, end, Adam<false, kTakesCare>{s, care});
  }
}

// The update with decoupled decay, fp32 gradients and no weight; adds to vectors[kNumRoads].
template <bool kTakesCare>
void count_roads(const AdamArrays& a, int64_t begin, int64_t end, const AdamScalars& s, int64_t* vectors) {
  using Rule = Adam<true, kTakesCare>;
  const Rule rule{s, Care(s)};
  update_range<Counting<Rule>, float, NoWeight>(a, begin, end, Counting<Rule>{rule, vectors});
}

void pattern(const AdamArrays& a, int64_t begin, int64_t end) { update_by_grad(a, begin, end, Pattern{}); }

template <class Weight>
void hold_range(const AdamArrays& a, int64_t begin, int64_t end) {
  const RoundOnly<Weight> body{a.master, static_cast<Weight*>(a.weight)};
  run_range(body, begin, end, a.weight != a.grad, a.weight, sizeof(Weight));
}

void hold(const AdamArrays& a, int64_t begin, int64_t end) {
  switch (a.weight_dtype) {
    case Dtype::kNone: return;
    case Dtype::kFloat32: return hold_range<float>(a, begin, end);
    case Dtype::kBfloat16: return hold_range<Bf16>(a, begin, end);
    case Dtype::kFloat16: return hold_range<Fp16>(a, begin, end);
  }
}
