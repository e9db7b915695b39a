// O = weights V, and the sum of the weights: what `attend` (attention.h) and `attend_many` (many_queries.h) end with.
#pragma once

#include "linear.h"

// A column of ones, as B.
struct Ones {
    alignas(64) bf16 tile[B_TILE];
    constexpr Ones() : tile() {
        for (int64_t i = 0; i < B_TILE; i++) tile[i] = 0x3f80;
    }
};
constexpr Ones ones;

// TILES * 16 dims of O, and with SUM what the weights sum up to, begun at zero (FRESH) or added to; `size` floats are one
// tile's. Their sums are independent of each other: four tiles at once keep the unit busy.
template <int TILES, bool FRESH, bool SUM>
inline void weigh_dims(const bf16 *weights, const bf16 *values, int64_t steps, int64_t dim, float *o, float *sums,
                       int64_t size) {
    if (FRESH) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_zero(5);
    } else {
        tile_load(0, o, 64);
        tile_load(1, o + size, 64);
        if (TILES == 4) {
            tile_load(2, o + 2 * size, 64);
            tile_load(3, o + 3 * size, 64);
        }
        if (SUM) tile_load(5, sums, 64);
    }
    for (int64_t k = 0; k < steps; k++) {
        const bf16 *v = values + k * dim * STEP;
        tile_load(4, weights + k * B_TILE, 64);
        tile_load(6, v, 64);
        _tile_dpbf16ps(0, 4, 6);
        tile_load(7, v + B_TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (TILES == 4) {
            tile_load(6, v + 2 * B_TILE, 64);
            _tile_dpbf16ps(2, 4, 6);
            tile_load(7, v + 3 * B_TILE, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        if (SUM) {
            tile_load(6, ones.tile, 64);
            _tile_dpbf16ps(5, 4, 6);
        }
    }
    _tile_stored(0, o, 64);
    _tile_stored(1, o + size, 64);
    if (TILES == 4) {
        _tile_stored(2, o + 2 * size, 64);
        _tile_stored(3, o + 3 * size, 64);
    }
    if (SUM) _tile_stored(5, sums, 64);
}

// O [dim / 16][queries][16] of one kv head and behind it the weights' sums [queries][16], all the same: over `steps`
// groups of 32 positions, begun at zero (FRESH) or added to.
template <bool AMX, bool FRESH>
inline void weigh(const bf16 *weights, const bf16 *values, int64_t queries, int64_t steps, int64_t dim, float *o) {
    const int64_t size = queries * TILE;
    float *sums = o + queries * dim;
    if (!AMX) {
        for (int64_t d = 0; d < dim; d += TILE)
            multiply_avx512<!FRESH>(weights, STEP, B_TILE, values + d / TILE * B_TILE, dim * STEP, steps, queries,
                                    o + d * queries, TILE);
        multiply_avx512<!FRESH>(weights, STEP, B_TILE, ones.tile, 0, steps, queries, sums, TILE);
        return;
    }
    if (dim % (4 * TILE)) {
        weigh_dims<2, FRESH, true>(weights, values, steps, dim, o, sums, size);
    } else {
        weigh_dims<4, FRESH, true>(weights, values, steps, dim, o, sums, size);
    }
    for (int64_t d = dim % (4 * TILE) ? 2 * TILE : 4 * TILE; d < dim; d += 4 * TILE)
        weigh_dims<4, FRESH, false>(weights, values + d / TILE * B_TILE, steps, dim, o + d * queries, nullptr, size);
}

// O / sum of one of `queries`, to its place `to` in packed rows. `o`: as `weigh` left it. Returns the sum.
inline float finish_query(const float *o, int64_t queries, int64_t query, int64_t dim, bf16 *to) {
    const float sum = o[queries * dim + query * TILE];
    const __m512 inverse = _mm512_set1_ps(1.0f / sum);
    for (int64_t d = 0; d < dim; d += TILE)
        store_bf16(to + d / STEP * B_TILE + d % STEP, _mm512_mul_ps(_mm512_load_ps(o + d * queries + query * TILE), inverse));
    return sum;
}
