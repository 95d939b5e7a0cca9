// The tiles of the products of gated_linear.cu: their sizes, where they lie, and what of shared memory they take.

#pragma once

#include <cuda.h>

#include "plan.h"

namespace {

constexpr int ROWS = 128, DEPTH = 64;    // of the left operand of a tile's product, and of both
constexpr int CLUSTER = 2, GROUP = 128;  // thread blocks; threads of four warps
// Steps of the depth and rounds of tiles from which on clusters keep together; steps before the end of a tile at which one tells.
constexpr int DEEP = 48, ROUNDS = 16, EARLY = 8;
constexpr int LEFT_BYTES = ROWS * DEPTH * 2;
constexpr int SLOT_BYTES = 8192;  // of a piece, what an epilogue takes at a time
constexpr int BOX = 64;           // columns of W_down side by side: 128 bytes
constexpr int EDGE = 16;          // rows of x that are asked for at once where a tile has fewer than it could

// What depends on the epilogue: columns of a tile's product, the right operand's; stages of the ring; features and rows of x of a tile
// and of a piece; slots to write, tensors it reads and how many pieces of each there is room for. TMA takes its time for each row
// of a piece, so they are as wide as u and g of the same features allow.
//
// SIDEWAYS, weights are on the left and x on the right: a block has 64 features, a cluster's two lie beside each other, and what
// both read is x. Tiles are narrower in features and may have fewer rows, so that few rows are shared out more evenly. Pieces of 64
// rows do not divide 160: those have 32.
template <int EPILOGUE>
struct Of {
  static constexpr bool DOWNWARD = EPILOGUE == DOWN, SIDEWAYS = EPILOGUE >= SIDE_192;
  static constexpr int COLUMNS = EPILOGUE == SIDE_128 ? 128 : EPILOGUE == SIDE_160 ? 160 : 192;
  static constexpr int STAGES = DOWNWARD ? 4 : EPILOGUE == SIDE_128 ? 6 : 5;
  static constexpr int FEATURES = DOWNWARD ? COLUMNS : SIDEWAYS ? ROWS / 2 : COLUMNS / 2, HIGH = SIDEWAYS ? COLUMNS : ROWS;
  static constexpr int WRITES = EPILOGUE == GRADIENT ? 2 : EPILOGUE == SIDE_160 ? 5 : 3;
  static constexpr int READS = EPILOGUE == GRADIENT ? 1 : DOWNWARD ? 2 : 0, AHEAD = DOWNWARD ? 2 : 1;
  static constexpr int PIECE = DOWNWARD || SIDEWAYS ? 64 : 32;
  static constexpr int HEIGHT = SLOT_BYTES / 2 / PIECE / (EPILOGUE == SIDE_160 ? 2 : 1);
  static constexpr int HALVES = HIGH / HEIGHT, PIECES = FEATURES / PIECE * HALVES;
  static constexpr int RIGHT_BYTES = COLUMNS * DEPTH * 2;
  // From one tile of a cluster to the same of the next, and to its other tile.
  static constexpr int DOWN_STEP = SIDEWAYS ? HIGH : CLUSTER * HIGH, ACROSS_STEP = SIDEWAYS ? CLUSTER * FEATURES : FEATURES;
  static constexpr int DOWN_OTHER = SIDEWAYS ? 0 : HIGH, ACROSS_OTHER = SIDEWAYS ? FEATURES : 0;
};

template <int EPILOGUE>
struct Shared {
  using A = Of<EPILOGUE>;
  alignas(1024) char ring[A::STAGES][LEFT_BYTES + A::RIGHT_BYTES];
  alignas(1024) char slots[A::WRITES + A::READS * A::AHEAD][SLOT_BYTES];
  float bias[2][2][96];                                        // of the tile of each group: value, gate
  float sums[A::READS > 0 ? 4 * A::HALVES : 1][2 * A::PIECE];  // of a piece's du and dg, by warps and halves
  uint64_t ready[A::STAGES], free[A::STAGES], came[A::AHEAD], taken[A::AHEAD];
};
constexpr size_t MOST = 227 * 1024;  // bytes of shared memory that a block may have
static_assert(sizeof(Shared<GRADIENT>) <= MOST && sizeof(Shared<DOWN>) <= MOST);
static_assert(sizeof(Shared<SIDE_192>) <= MOST && sizeof(Shared<SIDE_160>) <= MOST && sizeof(Shared<SIDE_128>) <= MOST);

// Names of the barriers of warps: to turns at the tensor cores, at the slots to write, and of a group's own warps.
enum Name { PRODUCT = 1, SLOT = 3, OWN = 5 };

struct Params {
  CUtensorMap x, x_edge, value, gate, y, u, g, first, second;  // as in plan.h; x_edge: x in boxes of EDGE rows
  const void *value_bias, *gate_bias;                          // or null
  int64_t value_bias_stride, gate_bias_stride;
  float* sums;              // (⌈M / 128⌉, 2, F) of du and dg, or null
  unsigned* pace;           // how many tiles all clusters have nearly ended, or null: they need not keep together
  int rows, hidden, steps;  // blocks of the depth
  int group;                // pairs of tiles, one below the other, that are taken together
};

// Where the tile of a turn is: in groups of pairs, so that what is read together stays in the cache.
template <int EPILOGUE>
struct Tile {
  using A = Of<EPILOGUE>;
  int row, feature;
  __device__ Tile(const Params& p, int turn, int rank) {
    const int down = ceil_div(p.rows, A::DOWN_STEP), across = ceil_div(p.hidden, A::ACROSS_STEP);
    const int first = turn / (p.group * across) * p.group, rows = min(down - first, p.group), within = turn % (p.group * across);
    row = (first + within % rows) * A::DOWN_STEP + rank * A::DOWN_OTHER;
    feature = within / rows * A::ACROSS_STEP + rank * A::ACROSS_OTHER;
  }
  // Of all clusters.
  __host__ __device__ static int count(const Params& p) { return ceil_div(p.rows, A::DOWN_STEP) * ceil_div(p.hidden, A::ACROSS_STEP); }
  __host__ __device__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace
