// Attention for many queries of a row that share a kv head: prompts, chunk by chunk. attention.h tells what is summed.
//
// K and V of a head are packed once. Then positions go by in blocks that stay in the first-level cache; for each block
// every tile of 16 queries that sees some of it makes its scores, turns them into weights and adds to its O. The offset
// of a query is its score at its own position, which is at hand before any other; should a weight outgrow it, the tile is
// done once more by `attend`, which looks at all scores first.
#pragma once

#include "attention.h"

constexpr int64_t MANY = 2 * TILE;          // queries; packing K pays from there on
constexpr int64_t BLOCK = 128;             // positions
constexpr float OUTGROWN = 1.2089258e24f;  // 2^80: a sum of weights that leaves room for the values

// K of positions [from, from + positions) as B: per 16 positions [head_dim / 32][16 lines][16 positions][2]; zero from `end`
// on.
template <bool INT8>
inline void pack_keys(const Pool &pool, const Row &row, int64_t kv_head, int64_t layer, int64_t from, int64_t positions,
                      int64_t end, bf16 *packed) {
    const int64_t line_bytes = pool.head_dim * pool.item_bytes;
    for (int64_t s = from; s < from + positions; s += TILE) {
        const int64_t written = end - s < TILE ? end - s : TILE;
        const char *lines = written > 0 ? pool.line(row.table, s, kv_head, layer, 0) : nullptr;
        const float *scale = INT8 && written > 0 ? pool.scale(row.table, s, kv_head, layer, 0) : nullptr;
        for (int64_t d = 0; d < pool.head_dim; d += STEP, packed += B_TILE) {
            __m512i line[TILE];
            for (int64_t i = 0; i < TILE; i++)
                line[i] = i >= written ? _mm512_setzero_si512()
                                       : load_line<INT8>(lines + i * line_bytes, d, INT8 ? scale[i] : 1);
            transpose16(line);
            for (int64_t r = 0; r < TILE; r++) _mm512_store_si512(packed + r * STEP, line[r]);
        }
    }
}

// S [16 queries][32 positions], `queries` [head_dim / 32][16][32].
template <bool AMX>
inline void score_group(const bf16 *queries, const bf16 *keys, int64_t dim, float *scores) {
    const int64_t steps = dim / STEP;
    const bf16 *next = keys + TILE * dim;
    if (!AMX) {
        multiply_avx512<false>(queries, STEP, B_TILE, keys, B_TILE, steps, TILE, scores, STEP);
        multiply_avx512<false>(queries, STEP, B_TILE, next, B_TILE, steps, TILE, scores + TILE, STEP);
        return;
    }
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < steps; k++) {
        _tile_loadd(4, queries + k * B_TILE, 64);
        _tile_loadd(6, keys + k * B_TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, next + k * B_TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, scores, STEP * sizeof(float));
    _tile_stored(1, scores + TILE, STEP * sizeof(float));
}

// The bits [oldest, newest] of 32.
inline __mmask32 seen_of_group(int64_t oldest, int64_t newest) {
    const int64_t low = oldest > 0 ? oldest : 0, high = newest < STEP - 1 ? newest : STEP - 1;
    return low > high ? 0 : (__mmask32)((((uint64_t)2 << high) - 1) & ~(((uint64_t)1 << low) - 1));
}

// A tile's scores of the block from position `s` on to weights, which are added to its sums [16][16]. `scores` and `weights`
// are [groups][16 queries][32 positions]; `position`: of each query. MASKED: some see only a part.
template <bool MASKED>
inline void soften_tile(const float *scores, int64_t groups, const int32_t *position, int64_t s, const Attention &attention,
                        const float *offsets, bf16 *weights, float *sums) {
    const Exponential weight(attention.scale);
    for (int64_t i = 0; i < TILE; i++, sums += TILE) {
        const __m512 shift = Exponential::shift_of(_mm512_set1_ps(offsets[i]));
        const int64_t newest = position[i] - s, oldest = attention.window ? newest - attention.window + 1 : 0;
        __m512 sum = _mm512_load_ps(sums);
        for (int64_t g = 0; g < groups; g++) {
            const float *at = scores + (g * TILE + i) * STEP;
            const __m512 low = weight(_mm512_load_ps(at), shift), high = weight(_mm512_load_ps(at + TILE), shift);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            if (MASKED) both = _mm512_maskz_mov_epi16(seen_of_group(oldest - g * STEP, newest - g * STEP), both);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)both, ones());
            _mm512_store_si512(weights + (g * TILE + i) * STEP, both);
        }
        _mm512_store_ps(sums, sum);
    }
}

// One kv head of one row. `out`: packed rows of [tokens, query heads * head_dim].
template <bool AMX, bool INT8>
void attend_many(const Pool &pool, const Row &row, int64_t kv_head, int64_t layer, const Attention &attention, const bf16 *q,
                 bf16 *out, Scratch &scratch, Scratch &second) {
    const int64_t dim = pool.head_dim, group = attention.heads / pool.kv_heads, end = row.start + row.tokens;
    const int64_t reach = attention.window ? row.start - attention.window + 1 : 0;
    const int64_t from = (reach > 0 ? reach : 0) / STEP * STEP, most = ceil_div(end - from, STEP) * STEP;
    const int64_t pairs = row.tokens * group, tiles = ceil_div(pairs, TILE), padded = tiles * TILE;
    float *o = scratch.at_least(padded * (dim + TILE + 2 + dim / 2) + most * dim + TILE * BLOCK * 3 / 2);
    float *sums = o + padded * dim, *scores = sums + padded * TILE;  // [padded][16]; [BLOCK / 32][16][32]
    bf16 *weights = (bf16 *)(scores + TILE * BLOCK), *keys = weights + TILE * BLOCK, *values = keys + most * dim;
    bf16 *queries = values + most * dim;  // [tiles][dim / 32][16][32]
    float *offsets = (float *)(queries + padded * dim);
    int32_t *position = (int32_t *)(offsets + padded);  // of a query; what fills the last tile repeats the last one
    pack_keys<INT8>(pool, row, kv_head, layer, from, most, end, keys);
    pack_values<INT8>(pool, row, kv_head, layer, from, most, end, values);

    const Exponential weight(attention.scale);
    for (int64_t i = 0; i < padded; i++) {
        const int64_t pair = i < pairs ? i : pairs - 1, at = row.start + pair / group;
        position[i] = (int32_t)at;
        const bf16 *query = q + ((row.first_token + pair / group) * attention.heads + kv_head * group + pair % group) * dim;
        const char *key = pool.line(row.table, at, kv_head, layer, 0);
        const float key_scale = INT8 ? *pool.scale(row.table, at, kv_head, layer, 0) : 1;
        __m512 own = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += STEP) {
            const __m512i part = _mm512_loadu_si512(query + d);
            own = _mm512_dpbf16_ps(own, (__m512bh)part, (__m512bh)load_line<INT8>(key, d, key_scale));
            _mm512_store_si512(queries + i / TILE * TILE * dim + d / STEP * B_TILE + i % TILE * STEP, part);
        }
        offsets[i] = _mm512_cvtss_f32(weight.offset(_mm512_set1_ps(_mm512_reduce_add_ps(own))));
        _mm512_store_ps(sums + i * TILE, _mm512_setzero_ps());
    }

    if (AMX) configure_tiles(TILE, TILE);
    for (int64_t s = from; s < end; s += BLOCK) {
        const int64_t first_tile = s > row.start ? (s - row.start) * group / TILE : 0;  // those before it do not see it
        for (int64_t t = first_tile; t < tiles; t++) {
            const int64_t first = position[t * TILE], last = position[t * TILE + TILE - 1];
            const int64_t oldest = attention.window ? first - attention.window + 1 : 0;
            if (oldest >= s + BLOCK) continue;
            const int64_t groups = ceil_div(last + 1 - s < BLOCK ? last + 1 - s : BLOCK, STEP);
            for (int64_t g = 0; g < groups; g++)
                score_group<AMX>(queries + t * TILE * dim, keys + (s - from + g * STEP) * dim, dim, scores + g * TILE * STEP);
            const bool masked = attention.window || s + groups * STEP - 1 > first;
            const auto soften = masked ? soften_tile<true> : soften_tile<false>;
            soften(scores, groups, position + t * TILE, s, attention, offsets + t * TILE, weights, sums + t * TILE * TILE);
            const bool fresh = s == from || oldest >= s;  // nothing was added to its O yet
            const auto add = fresh ? weigh<AMX, true> : weigh<AMX, false>;
            add(weights, values + (s - from) * dim, TILE, groups, dim, o + t * TILE * dim);
        }
    }
    if (AMX) _tile_release();

    for (int64_t t = 0; t < tiles; t++) {
        bool outgrown = false;
        const int64_t first = t * TILE, stop = first + TILE < pairs ? first + TILE : pairs;
        for (int64_t i = first; i < stop; i++) {
            bf16 *to = packed_at(out, attention.heads * dim / STEP, row.first_token + i / group,
                                 (kv_head * group + i % group) * dim);
            outgrown |= !(finish_query(o + first * dim, sums + first * TILE, TILE, i - first, dim, to) < OUTGROWN);
        }
        if (outgrown) attend<AMX, INT8>(pool, row, kv_head, 1, layer, attention, q, first, stop, out, second);
    }
}
