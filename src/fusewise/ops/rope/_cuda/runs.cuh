// Hopper's 1D bulk copies (cp.async.bulk) between global and shared memory, whose completion mbarriers track.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../../_shared/mbarrier.cuh"
#include "async.cuh"

namespace {

// Addresses and sizes must be multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(const char* from, uint32_t to, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(char* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until the outgoing copies have read shared memory.
__device__ __forceinline__ void bulk_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace
