// A call of qk_norm_rope as native code receives it; `_native.py` packs the fields in this order.

#pragma once

#include "../rope/plan.h"

// Everything that is fixed by the call signature.
struct NormPlan {
  Plan rotation;            // from q and k into new tensors
  int64_t weight_kinds[2];  // Kind of each weight; without weights, of q and k
  int64_t together;         // 1: all heads of a token are normalized together
  double eps, weight_offset;
};

// Everything that changes from call to call. Absent weights are null.
struct NormCall {
  Call rotation;
  const void* weights[2];
};
