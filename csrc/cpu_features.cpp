#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif

namespace deep_offload {

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf) {
  Registers r;
  if (__get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return Registers{};
  return r;
}

bool bit(uint32_t word, int position) { return ((word >> position) & 1u) != 0; }

// Register state that the operating system saves on a context switch (XCR0); 0 where it cannot be asked.
uint32_t saved_state() {
  if (!bit(cpuid(1).ecx, 27)) return 0;  // OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

constexpr uint32_t kYmmState = 0x6;   // SSE and AVX
constexpr uint32_t kZmmState = 0xe6;  // and opmask, upper halves, upper sixteen

}  // namespace

bool cpu_has_avx2() {
  const Registers one = cpuid(1), seven = cpuid(7);
  return (saved_state() & kYmmState) == kYmmState && bit(one.ecx, 28) && bit(one.ecx, 29) && bit(seven.ebx, 5);
}

bool cpu_has_avx512() {
  const uint32_t ebx = cpuid(7).ebx;
  return cpu_has_avx2() && (saved_state() & kZmmState) == kZmmState && bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) &&
         bit(ebx, 31);
}

bool cpu_assists_subnormals() {
  const Registers vendor = cpuid(0);  // "Genu" "ineI" "ntel"
  return vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 && vendor.ecx == 0x6c65746e;
}

#else

bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
bool cpu_assists_subnormals() { return false; }

#endif

}  // namespace deep_offload
