// Attention for many queries of a row that share a kv head: prompts, chunk by chunk. attention.h tells what is summed.
//
// K and V of a head are packed once. Then positions go by in blocks that stay in the first-level cache; for each block
// every tile of 16 queries that sees some of it makes its scores, turns them into weights and adds to its O. The offset
// of a query is its score at its own position, which is at hand before any other. Should a weight outgrow it, or should
// query and keys be so long that scores may be FAR, the tile is done by `attend`, which looks at all scores first.
#pragma once

#include "attention.h"

constexpr int64_t MANY = 2 * TILE;          // queries; packing K pays from there on
constexpr int64_t BLOCK = 128;             // positions
constexpr float OUTGROWN = 1.2089258e24f;  // 2^80: a sum of weights that leaves room for the values

// K of positions [from, from + positions) as B: per 32 positions twice [head_dim / 32][16 lines][16 positions][2], zero from
// `end` on. Four positions are in the first half, the next four in the second, so that weights come out in order. Returns
// the square of the longest key's length; NaN or infinity where there is any.
template <bool INT8>
inline float pack_keys(const Pool &pool, const Row &row, int64_t kv_head, int64_t layer, int64_t from, int64_t positions,
                       int64_t end, bf16 *packed) {
    __m512i longest = _mm512_setzero_si512();  // squares, compared as bits: NaN is more than any
    for (int64_t half = from; half < from + positions; half += half % STEP ? STEP - 4 : 4) {
        const char *lines[TILE];
        float scales[TILE];
        for (int64_t i = 0; i < TILE; i++) {
            const int64_t at = half + i / 4 * 8 + i % 4;
            lines[i] = at < end ? pool.line(row.table, at, kv_head, layer, 0) : nullptr;
            scales[i] = INT8 && at < end ? *pool.scale(row.table, at, kv_head, layer, 0) : 1;
        }
        __m512 square = _mm512_setzero_ps();
        for (int64_t d = 0; d < pool.head_dim; d += STEP, packed += B_TILE) {
            __m512i line[TILE];
            for (int64_t i = 0; i < TILE; i++)
                line[i] = lines[i] ? load_line<INT8>(lines[i], d, scales[i]) : _mm512_setzero_si512();
            transpose16(line);
            for (int64_t r = 0; r < TILE; r++) {
                _mm512_store_si512(packed + r * STEP, line[r]);
                square = _mm512_dpbf16_ps(square, (__m512bh)line[r], (__m512bh)line[r]);
            }
        }
        longest = _mm512_max_epu32(longest, (__m512i)square);
    }
    const uint32_t most = _mm512_reduce_max_epu32(longest);
    float length;
    memcpy(&length, &most, sizeof length);
    return length;
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
        tile_load(4, queries + k * B_TILE, 64);
        tile_load(6, keys + k * B_TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        tile_load(7, next + k * B_TILE, 64);
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

// A tile's scores of the 32 positions from `s` on to weights, both [16 queries][32 positions]; `position` and `shifts` are
// those of the queries. MASKED: some see only a part.
template <bool MASKED>
inline void soften_group(const float *scores, const int32_t *position, int64_t s, const Attention &attention,
                         const float *shifts, bf16 *weights) {
    const Exponential weight(attention.scale);
    for (int64_t i = 0; i < TILE; i++, scores += STEP, weights += STEP) {
        const __m512 shift = _mm512_set1_ps(shifts[i]);
        __m512i both = weight.operator()<false>(_mm512_load_ps(scores), _mm512_load_ps(scores + TILE), shift);
        if (MASKED) {
            const int64_t newest = position[i] - s, oldest = attention.window ? newest - attention.window + 1 : 0;
            both = _mm512_maskz_mov_epi16(seen_of_group(oldest, newest), both);
        }
        _mm512_store_si512(weights, both);
    }
}

// The weights of a tile in `groups` groups of 32 positions from `s` on. Scores of the next group are made before those of
// one are read, which a store would hold up; two groups of them take little of the first-level cache.
template <bool AMX, bool MASKED>
inline void weigh_tile(const bf16 *queries, const bf16 *keys, int64_t groups, const int32_t *position, int64_t s,
                       const Attention &attention, int64_t dim, const float *shifts, bf16 *weights) {
    alignas(64) float scores[2][TILE * STEP];
    score_group<AMX>(queries, keys, dim, scores[0]);
    for (int64_t g = 0; g < groups; g++) {
        if (g + 1 < groups) score_group<AMX>(queries, keys + (g + 1) * STEP * dim, dim, scores[(g + 1) % 2]);
        soften_group<MASKED>(scores[g % 2], position, s + g * STEP, attention, shifts, weights + g * B_TILE);
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
    float *o = scratch.at_least(padded * (dim + TILE + 3 + dim / 2) + most * dim + TILE * BLOCK / 2);
    bf16 *weights = (bf16 *)(o + padded * (dim + TILE)), *keys = weights + TILE * BLOCK, *values = keys + most * dim;
    bf16 *queries = values + most * dim;  // [tiles][dim / 32][16][32]
    float *shifts = (float *)(queries + padded * dim);
    int32_t *position = (int32_t *)(shifts + padded);  // of a query; what fills the last tile repeats the last one
    int32_t *far = position + padded;                  // tiles whose scores may be too far apart
    const float longest = pack_keys<INT8>(pool, row, kv_head, layer, from, most, end, keys);
    pack_values<INT8>(pool, row, kv_head, layer, from, most, end, values, [] {});

    const Exponential weight(attention.scale);
    __m512i squares = _mm512_setzero_si512();  // no query of the tile is longer than the root of their sum
    for (int64_t i = 0; i < padded; i++) {
        const int64_t pair = i < pairs ? i : pairs - 1, at = row.start + pair / group;
        position[i] = (int32_t)at;
        const bf16 *query = q + ((row.first_token + pair / group) * attention.heads + kv_head * group + pair % group) * dim;
        const char *key = pool.line(row.table, at, kv_head, layer, 0);
        const float key_scale = INT8 ? *pool.scale(row.table, at, kv_head, layer, 0) : 1;
        __m512 own = _mm512_setzero_ps(), square = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += STEP) {
            const __m512i part = _mm512_loadu_si512(query + d);
            own = _mm512_dpbf16_ps(own, (__m512bh)part, (__m512bh)load_line<INT8>(key, d, key_scale));
            square = _mm512_dpbf16_ps(square, (__m512bh)part, (__m512bh)part);
            _mm512_store_si512(queries + i / TILE * TILE * dim + d / STEP * B_TILE + i % TILE * STEP, part);
        }
        const __m512 offset = weight.offset(_mm512_set1_ps(_mm512_reduce_add_ps(own)));
        shifts[i] = _mm512_cvtss_f32(Exponential::shift_of(offset));
        squares = _mm512_max_epu32(squares, (__m512i)square);  // as bits: NaN is more than any
        if (i % TILE < TILE - 1) continue;
        const float furthest = std::sqrt(_mm512_reduce_add_ps((__m512)squares) * longest) * attention.scale;
        far[i / TILE] = !(furthest < Exponential::FAR);
        squares = _mm512_setzero_si512();
    }

    if (AMX) configure_tiles(TILE, TILE);
    for (int64_t s = from; s < end; s += BLOCK) {
        const int64_t first_tile = s > row.start ? (s - row.start) * group / TILE : 0;  // those before it do not see it
        for (int64_t t = first_tile; t < tiles; t++) {
            const int64_t first = position[t * TILE], last = position[t * TILE + TILE - 1];
            const int64_t oldest = attention.window ? first - attention.window + 1 : 0;
            if (far[t] || oldest >= s + BLOCK) continue;
            const int64_t groups = ceil_div(last + 1 - s < BLOCK ? last + 1 - s : BLOCK, STEP);
            const bool masked = attention.window || s + groups * STEP - 1 > first;
            const auto weigh_it = masked ? weigh_tile<AMX, true> : weigh_tile<AMX, false>;
            weigh_it(queries + t * TILE * dim, keys + (s - from) * dim, groups, position + t * TILE, s, attention, dim,
                     shifts + t * TILE, weights);
            const bool fresh = s == from || oldest >= s;  // nothing was added to its O yet
            const auto add = fresh ? weigh<AMX, true> : weigh<AMX, false>;
            add(weights, values + (s - from) * dim, TILE, groups, dim, o + t * TILE * (dim + TILE));
        }
    }
    if (AMX) _tile_release();

    for (int64_t t = 0; t < tiles; t++) {
        bool again = far[t];
        const int64_t first = t * TILE, stop = first + TILE < pairs ? first + TILE : pairs;
        for (int64_t i = first; i < stop && !again; i++) {
            bf16 *to = packed_at(out, attention.heads * dim / STEP, row.first_token + i / group,
                                 (kv_head * group + i % group) * dim);
            again = !(finish_query(o + first * (dim + TILE), TILE, i - first, dim, to) < OUTGROWN);
        }
        if (again) attend<AMX, INT8>(pool, row, kv_head, 1, layer, attention, q, first, stop, out, second);
    }
}
