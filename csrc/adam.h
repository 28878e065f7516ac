// What the bindings know of the kernels: plain pointers in, nothing checked here (bindings.cpp has checked it all).
#pragma once

#include <cstdint>
#include <vector>

namespace deep_offload {

enum class Dtype : int { kNone, kFloat32, kBfloat16, kFloat16 };

constexpr int64_t kNumScalars = 9;  // columns of the table of scalars, see deep_offload/kernels/scalars.py
constexpr int64_t kHold = -1;       // class of a segment whose state is left alone

// One row of the table of scalars, in its order, and the multiplier that all classes share.
struct AdamScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, decay, sqrt_bias2, weight_decay_l2;
  float grad_scale;
};

struct Segment {
  int64_t start, end, index;
};

// Arrays of one subgroup. `weight` may be null (kNone), or `grad` itself where both have 16 bits.
struct AdamArrays {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* weight;
  Dtype grad_dtype;
  Dtype weight_dtype;
};

// The ways to the same bits that a vector may take, see care.h.
enum class Road : int { kPlain, kScaled, kWide };
constexpr int64_t kNumRoads = 3;

// What one instruction set offers; every function works on the elements [begin, end).
struct Isa {
  const char* name;
  bool (*is_supported)();
  void (*adam)(const AdamArrays&, int64_t begin, int64_t end, const AdamScalars&, bool decoupled);
  void (*hold)(const AdamArrays&, int64_t begin, int64_t end);
  void (*pattern)(const AdamArrays&, int64_t begin, int64_t end);
  // Of sets with several roads: adam with decoupled decay, fp32 gradients and no weight, counting vectors by road.
  void (*count_roads)(const AdamArrays&, int64_t begin, int64_t end, const AdamScalars&, int64_t* vectors) = nullptr;
};

// Those that this processor and operating system run, best first.
std::vector<const Isa*> supported_isas();

// Update numel elements. `segments` cover them in order; `table` holds kNumScalars values per class.
void adam_update(const Isa& isa, const AdamArrays& arrays, int64_t numel, const std::vector<Segment>& segments,
                 const float* table, float grad_scale, bool decoupled, int num_threads);

// Update numel elements with one row of the table, on one thread; returns the number of vectors that took each road.
// For an isa that has count_roads, fp32 gradients and no weight.
std::vector<int64_t> adam_roads(const Isa& isa, const AdamArrays& arrays, int64_t numel, const float* row,
                                float grad_scale);

// The reads and writes of adam_update without its arithmetic, for calibration. Destroys the contents. Seconds.
double adam_pattern(const Isa& isa, const AdamArrays& arrays, int64_t numel, int num_threads);

// a = b + s * c with streaming stores where the processor has them. Seconds.
double stream_triad(float* a, const float* b, const float* c, int64_t numel, int num_threads);

// Zero num_bytes so that each page is first touched by the thread that will update it.
void first_touch(void* data, int64_t num_bytes, int num_threads);

}  // namespace deep_offload
