// A call of qk_norm_rope and its backward as native code receives them; `_native.py` packs the fields in this order.

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

// The backward of a call: x of its rotation is that of the forward, y the gradient of x.
struct NormGradPlan {
  NormPlan norm;
  int64_t dy_strides[2][3];  // elements: batch, token, head
};

struct NormGradCall {
  NormCall norm;
  const void* dy[2];
  void* dweights[2];  // null if they are not wanted
  void* partials;     // float32, as many as `fusewise_qk_norm_rope_partials` says
};
