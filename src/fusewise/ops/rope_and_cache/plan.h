// A call of rope_and_cache_ as native code receives it; `_native.py` packs the fields in this order.
//
// Shape legend: as in ../rope/plan.h; N blocks of the cache, S slots of a block.

#pragma once

#include "../rope/plan.h"

// Everything that is fixed by the call signature. Strides in elements, flags 0 or 1.
struct CachePlan {
  Plan rotation;                                                  // of q and k in place
  int64_t write_k, v_dim, v_strides[3];                           // batch, token, head
  int64_t blocks, block_size, cache_strides[2][3];                // of k and v: block, slot, head
  int64_t has_slots, mapped, wide_slots, slot_strides[2];         // tokens with an entry in slots; batch, token
  int64_t has_table, table_blocks, wide_table, table_strides[2];  // blocks of a sequence; sequence, block
  int64_t sequence_is_token;
};

// Everything that changes from call to call. Absent tensors are null, and so are tensors without elements: has_slots and
// has_table distinguish them.
struct CacheCall {
  Call rotation;
  const void* v;
  void* caches[2];
  const void *slots, *table;
};
