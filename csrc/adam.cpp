#include "adam.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cpu_features.h"
#include "isa/isa.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace deep_offload {
namespace {

// Round to nearest, subnormals kept, for as long as it lives. A thread may come in with other modes
// (torch.set_flush_denormal, a library's start-up code), and they would change bits.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(kAllMaskedToNearest); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kAllMaskedToNearest = 0x1f80;
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~IeeeMode() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  IeeeMode() {}
  ~IeeeMode() {}
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

// Cuts between threads: at whole 4 KiB pages of 16-bit data (two pages of fp32) where there is enough work, else at
// whole cache lines, counted from the address of the master.
constexpr int64_t kPage = 2048;
constexpr int64_t kLine = 32;

int64_t cut(const float* base, int64_t numel, int64_t part, int64_t num_parts) {
  if (part == 0) return 0;
  if (part == num_parts) return numel;
  const int64_t unit = numel >= 8 * kPage * num_parts ? kPage : kLine;
  const int64_t offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) / sizeof(float)) % unit;
  const int64_t even = numel / num_parts * part + std::min(part, numel % num_parts);
  return std::max<int64_t>(0, (even + offset) / unit * unit - offset);
}

// Parts of one thread's share, and the least elements of a part where there are several: a thread that loses its core
// for a while, to the one that launches kernels, say, leaves its share to the others instead of making all wait.
constexpr int64_t kPartsPerThread = 16;
constexpr int64_t kLeastPart = 32 * kPage;

// Call work(begin, end) for disjoint parts that cover [0, numel), on num_threads threads or as many as OpenMP grants.
template <class Work>
void parallel(const float* base, int64_t numel, int num_threads, const Work& work) {
  const int64_t num_parts =
      num_threads * std::clamp<int64_t>(numel / (num_threads * kLeastPart), 1, kPartsPerThread);
#pragma omp parallel num_threads(num_threads)
  {
    const IeeeMode ieee;
#pragma omp for schedule(dynamic)
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t begin = cut(base, numel, part, num_parts), end = cut(base, numel, part + 1, num_parts);
      if (begin < end) work(begin, end);
    }
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

AdamScalars scalars_of(const float* row, float grad_scale) {
  return {row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], grad_scale};
}

}  // namespace

std::vector<const Isa*> supported_isas() {
  std::vector<const Isa*> candidates = {&kPortable, &kScalar};
#if defined(__x86_64__)
  if (cpu_assists_subnormals()) {
    candidates.insert(candidates.begin(), {&kAvx512Wide, &kAvx512, &kAvx2Wide, &kAvx2});
  } else {
    candidates.insert(candidates.begin(), {&kAvx512, &kAvx512Wide, &kAvx2, &kAvx2Wide});
  }
#endif
  std::vector<const Isa*> supported;
  for (const Isa* isa : candidates) {
    if (isa->is_supported()) supported.push_back(isa);
  }
  return supported;
}

void adam_update(const Isa& isa, const AdamArrays& arrays, int64_t numel, const std::vector<Segment>& segments,
                 const float* table, float grad_scale, bool decoupled, int num_threads) {
  parallel(arrays.master, numel, num_threads, [&](int64_t begin, int64_t end) {
    const auto ends_before = [](int64_t position, const Segment& s) { return position < s.end; };
    auto segment = std::upper_bound(segments.begin(), segments.end(), begin, ends_before);
    for (; segment != segments.end() && segment->start < end; ++segment) {
      const int64_t lo = std::max(begin, segment->start), hi = std::min(end, segment->end);
      if (segment->index == kHold) {
        isa.hold(arrays, lo, hi);
      } else {
        isa.adam(arrays, lo, hi, scalars_of(table + segment->index * kNumScalars, grad_scale), decoupled);
      }
    }
  });
}

std::vector<int64_t> adam_roads(const Isa& isa, const AdamArrays& arrays, int64_t numel, const float* row,
                                float grad_scale) {
  std::vector<int64_t> vectors(kNumRoads);
  parallel(arrays.master, numel, 1, [&](int64_t begin, int64_t end) {
    isa.count_roads(arrays, begin, end, scalars_of(row, grad_scale), vectors.data());
  });
  return vectors;
}

double adam_pattern(const Isa& isa, const AdamArrays& arrays, int64_t numel, int num_threads) {
  const auto start = std::chrono::steady_clock::now();
  parallel(arrays.master, numel, num_threads, [&](int64_t begin, int64_t end) { isa.pattern(arrays, begin, end); });
  return seconds_since(start);
}

double stream_triad(float* a, const float* b, const float* c, int64_t numel, int num_threads) {
  const auto start = std::chrono::steady_clock::now();
  parallel(a, numel, num_threads, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
#if defined(__x86_64__)
    for (; i < end && reinterpret_cast<uintptr_t>(a + i) % 16 != 0; ++i) a[i] = b[i] + 3.0f * c[i];
    const __m128 three = _mm_set1_ps(3.0f);
    for (; i + 4 <= end; i += 4) {
      _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), _mm_mul_ps(three, _mm_loadu_ps(c + i))));
    }
    _mm_sfence();
#endif
    for (; i < end; ++i) a[i] = b[i] + 3.0f * c[i];
  });
  return seconds_since(start);
}

void first_touch(void* data, int64_t num_bytes, int num_threads) {
  const int64_t numel = num_bytes / static_cast<int64_t>(sizeof(float));
  parallel(static_cast<float*>(data), numel, num_threads, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<float*>(data) + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
  });
  const int64_t done = numel * static_cast<int64_t>(sizeof(float));
  std::memset(static_cast<char*>(data) + done, 0, static_cast<size_t>(num_bytes - done));
}

}  // namespace deep_offload
