// Element types of gradients and weights. They are only ever pointed at; no arithmetic is defined on them.
#pragma once

#include <cstdint>

namespace deep_offload {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct NoWeight {};  // the place of a weight that is not asked for

constexpr uint32_t kBf16Nan = 0x7fc0;  // what any NaN master is rounded to

}  // namespace deep_offload
