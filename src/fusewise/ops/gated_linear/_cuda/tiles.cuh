// Tile shapes of products.cuh, the tile scheduler, and the shared-memory layout.

#pragma once

#include <cuda.h>

#include "plan.h"

namespace {

constexpr int ROWS = 128, DEPTH = 64;    // tile of the left operand; DEPTH of both, in 16 bits
constexpr int DEPTH_BYTES = DEPTH * 2;   // of a row of an operand in a stage, whatever its type: that of the swizzle
constexpr int CLUSTER = 2, GROUP = 128;  // thread blocks; threads of a warpgroup
constexpr int GROUP_M = 8;               // rows of tile pairs per group of the raster order: a square wave reads the least
// `WaveSync` is used from so many k-steps and waves on; a cluster arrives so many k-steps before the end of a tile.
constexpr int SYNC_STEPS = 48, SYNC_WAVES = 16, SYNC_EARLY = 8;
constexpr int LEFT_BYTES = ROWS * DEPTH_BYTES;
constexpr int MOST = 227 * 1024;  // bytes of shared memory that a block may have
constexpr int SMALL = 2048;       // of them for biases, sums and barriers
constexpr int BOX = 64;           // columns of W_down in a TMA box: 128 bytes

// Per epilogue: COLUMNS of the tile's product (N of the wgmma); FEATURES and rows of x (HIGH) of a tile, PIECE and HEIGHT of an epilogue
// piece; staging slots WRITES, pieces staged at a time (BUFFERS), tensors READS and the pieces of each that fit (AHEAD), shared by the two
// consumer warpgroups or of its OWNERS each; the ring's STAGES fill the remaining shared memory. Where each has its own, both may be in
// their epilogue at once, which pays off where that takes longer than a main loop.
// The cost of a TMA store is per row, so pieces are as wide as u and g of the same features allow.
//
// SIDEWAYS, the weights are the left operand and x is the right one: a block has 64 features, the two blocks of a cluster are side by
// side and share x. Tiles are narrower in features and may have fewer rows, which balances small batches better. They are not
// divided into pieces: two slots hold the whole tile, one per TMA box of x.
template <int EPILOGUE>
struct Traits {
  static constexpr bool DOWNWARD = EPILOGUE == DOWN, SIDEWAYS = EPILOGUE >= SIDE_208 && EPILOGUE <= SIDE_128;
  static constexpr bool TF32 = EPILOGUE >= TF32_Y, KEEP = EPILOGUE == PREACT || EPILOGUE == TF32_PREACT;
  static constexpr int WORD = TF32 ? 4 : 2, STEP = DEPTH_BYTES / WORD;  // bytes of an element; depth of a stage
  static constexpr int SIDES[] = {208, 192, 160, 144, 128}, COLUMNS = SIDEWAYS ? SIDES[EPILOGUE - SIDE_208] : 192;
  static constexpr int FEATURES = DOWNWARD ? COLUMNS : SIDEWAYS ? ROWS / 2 : COLUMNS / 2, HIGH = SIDEWAYS ? COLUMNS : ROWS;
  static constexpr int WRITES = EPILOGUE == GRADIENT || SIDEWAYS ? 2 : 3;
  static constexpr int READS = EPILOGUE == GRADIENT ? 1 : DOWNWARD ? 2 : 0, AHEAD = 2;
  static constexpr int OWNERS = EPILOGUE == GRADIENT ? 2 : 1, BUFFERS = OWNERS, SLOTS = WRITES * BUFFERS + READS * AHEAD;
  static constexpr int PIECE = DOWNWARD || SIDEWAYS ? 64 : 32;
  static constexpr int SHARING = SIDEWAYS ? CLUSTER : 1;  // blocks that load a part of the tile's x each
  static constexpr int HEIGHT = SIDEWAYS ? HIGH / CLUSTER : READS > 0 ? 64 : 128, PIECE_BYTES = HEIGHT * PIECE * WORD;
  static constexpr int HALVES = HIGH / HEIGHT, PIECES = FEATURES / PIECE * HALVES;
  static constexpr int RIGHT_BYTES = COLUMNS * DEPTH_BYTES;
  static constexpr int STAGES = (MOST - SMALL - OWNERS * SLOTS * PIECE_BYTES) / (LEFT_BYTES + RIGHT_BYTES);
  // Distance between the tiles of neighbouring clusters, and between the two tiles of a cluster.
  static constexpr int DOWN_STEP = SIDEWAYS ? HIGH : CLUSTER * HIGH, ACROSS_STEP = SIDEWAYS ? CLUSTER * FEATURES : FEATURES;
  static constexpr int DOWN_OTHER = SIDEWAYS ? 0 : HIGH, ACROSS_OTHER = SIDEWAYS ? FEATURES : 0;
};

template <int EPILOGUE>
struct Shared {
  using A = Traits<EPILOGUE>;
  alignas(1024) char ring[A::STAGES][LEFT_BYTES + A::RIGHT_BYTES];
  alignas(1024) char slots[A::OWNERS][A::SLOTS][A::PIECE_BYTES];
  float bias[2][2][96];                                        // per warpgroup: value, gate
  float sums[A::OWNERS][A::READS > 0 ? 4 : 1][2 * A::PIECE];  // of the du and dg of a piece's features, per warp
  uint64_t ready[A::STAGES], free[A::STAGES], inputs_ready[A::OWNERS][A::AHEAD], inputs_free[A::OWNERS][A::AHEAD];
};

// Named barriers: whose turn it is for the main loop, for the output slots; and one within each warpgroup.
enum Name { PRODUCT = 1, SLOT = 3, OWN = 5 };

}  // namespace

struct Params {
  CUtensorMap x, x_edge, value, gate, y, y_edge, u, g, first, second;  // as in plan.h; x_edge, y_edge: in boxes of `edge` rows
  const void *value_bias, *gate_bias;                                  // or null
  int64_t value_bias_stride, gate_bias_stride;
  float* sums;              // (⌈M / 128⌉, 2, F) of du and dg, or null
  unsigned* wave_counter;   // arrivals of all clusters at `WaveSync`, or null: unused
  int rows, hidden, steps;  // k-steps, of a stage each
  int edge;                 // rows of a TMA box in a tile that x fills in part: a multiple of 8, as in the swizzle
  int turns, whole;         // of clusters; and those with a whole tile, before those with half of one
};

namespace {

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The tile of a turn, in grouped raster order: tiles that share operands run at about the same time, and hit L2. The last SIDEWAYS tiles
// are halved, each half a turn, if that gives all of them to clusters that would otherwise be idle.
template <int EPILOGUE>
struct Tile {
  using A = Traits<EPILOGUE>;
  int row, feature;
  int box;    // rows of a TMA box of x: the whole tile, or SIDEWAYS half of it
  int half;   // which half, or -1: both
  bool full;  // whether x fills the tile
  __device__ Tile(const Params& p, int turn, int rank) {
    half = A::SIDEWAYS && turn >= p.whole ? (turn - p.whole) % 2 : -1;
    if (half >= 0) turn = p.whole + (turn - p.whole) / 2;
    const int down = ceil_div(p.rows, A::DOWN_STEP), across = ceil_div(p.hidden, A::ACROSS_STEP);
    const int first = turn / (GROUP_M * across) * GROUP_M, rows = min(down - first, GROUP_M), within = turn % (GROUP_M * across);
    row = (first + within % rows) * A::DOWN_STEP + rank * A::DOWN_OTHER;
    feature = within / rows * A::ACROSS_STEP + rank * A::ACROSS_OTHER;
    full = p.rows - row >= A::HIGH;
    box = full ? A::HIGH / A::SHARING : p.edge;
    if (half >= 0) row += half * box;
  }
};

}  // namespace
