// Causal attention over the block pool, read in place (no gather). One work item: one kv head of one row.
//
// The queries of a row that share a kv head are pairs (token, query head of the group); 16 of them are a tile.
// 1. Scores S = K Q^T. A few queries (`attend`): K's lines are used as they lie in their blocks, and S is [position][query].
//    Many of them (`attend_many`, many_queries.h): K is packed once for all of them, and S is [query][position].
// 2. Weights 2^(s - offset), in bfloat16, where the offset of a query is a whole number near its largest score.
// 3. O [query][dim] = weights V, 32 positions at a time, counted from position 0. The sum of the weights is one more column
//    of it, as if V had a column of ones.
// Positions that a query may not see get weight 0 and add exactly 0, and a query's positions are always summed in
// the same groups of 32. Another offset multiplies every weight and every sum by a power of two, which rounds nothing and
// leaves O / sum as it is. So the result depends neither on which other tokens are in the step nor on which of the two
// ways was taken (DESIGN I5).
#pragma once

#include "exponential.h"
#include "weigh.h"

struct Pool {
    char *data;  // [blocks, kv_heads, layers, 2] pages: block_size lines of bf16, or of int8 and then their float scales
    int64_t kv_heads, layers, block_size, head_dim, item_bytes;

    char *page(int64_t block, int64_t kv_head, int64_t layer, int64_t value) const {
        const int64_t bytes = block_size * (head_dim * item_bytes + (item_bytes == 1 ? sizeof(float) : 0));
        return data + (((block * kv_heads + kv_head) * layers + layer) * 2 + value) * bytes;
    }
    // The line of one position: `position` is within the row that `table` belongs to.
    char *line(const int64_t *table, int64_t position, int64_t kv_head, int64_t layer, int64_t value) const {
        return page(table[position / block_size], kv_head, layer, value) + position % block_size * head_dim * item_bytes;
    }
    // The scale of that line, where the pool holds int8.
    float *scale(const int64_t *table, int64_t position, int64_t kv_head, int64_t layer, int64_t value) const {
        return (float *)(page(table[position / block_size], kv_head, layer, value) + block_size * head_dim) +
               position % block_size;
    }
};

// A line in int8, as engine/model/kv_codec.py: q = round(x / s), s = max |x| / 127. Where any is NaN, s is.
inline void quantise_line(const float *x, int64_t n, char *q, float *scale) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 unordered = 0;
    for (int64_t i = 0; i < n; i += TILE) {
        const __m512 v = _mm512_loadu_ps(x + i);
        unordered |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
    }
    *scale = unordered ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(most) / 127.0f;
    const __m512 step = _mm512_set1_ps(*scale == 0.0f ? 1.0f : *scale);
    for (int64_t i = 0; i < n; i += TILE) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(x + i), step));
        _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtsepi32_epi8(whole));
    }
}

// 32 values of a line, as bf16.
template <bool INT8>
inline __m512i load_line(const char *line, int64_t d, float scale) {
    if (!INT8) return _mm512_loadu_si512(line + d * sizeof(bf16));
    const __m512 s = _mm512_set1_ps(scale);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(line + d))));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(line + d + TILE))));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, s), _mm512_mul_ps(low, s));
}

struct Row {
    const int64_t *table;
    int64_t first_token;  // among the step's
    int64_t tokens;
    int64_t start;  // position of the first one
};

struct Attention {
    int64_t heads, window;  // window 0: none
    float scale;            // of scores, times log2(e)
};

// The order of words that makes [16 words of a][16 words of b] to pairs.
alignas(64) constexpr uint16_t ALTERNATE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// The order of words that makes what `Exponential` returns to pairs of one of its first and one of its other scores.
alignas(64) constexpr uint16_t PAIRED[32] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,  13, 10, 14, 11, 15,
                                             16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31};

constexpr int64_t FEW = 128;  // positions whose V is packed and used before the next
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Hides from scores [position][query] of one tile what its queries may not see, and returns the shifts of their offsets.
// `positions` is a multiple of 16.
inline __m512 shifts_of(float *scores, int64_t positions, int64_t from, const int32_t *query, const Attention &attention) {
    const __m512 hidden = _mm512_set1_ps(HIDDEN);
    const __m512i newest = _mm512_load_si512(query);
    const __m512i oldest = _mm512_sub_epi32(newest, _mm512_set1_epi32((int)attention.window));
    // Positions [0, seen_by_all) need no mask; queries of a tile come in order of position.
    const int64_t first = _mm512_reduce_min_epi32(newest) - from + 1;
    const int64_t seen_by_all = attention.window ? 0 : (first < positions ? first : positions) / TILE * TILE;
    __m512 most[2] = {hidden, hidden};
    __mmask16 lost = 0;  // queries with a score that is NaN, which no maximum tells of
    for (int64_t s = 0; s < seen_by_all; s += 2) {
        const __m512 even = _mm512_load_ps(scores + s * TILE), odd = _mm512_load_ps(scores + (s + 1) * TILE);
        most[0] = _mm512_max_ps(most[0], even);
        most[1] = _mm512_max_ps(most[1], odd);
        lost |= _mm512_cmp_ps_mask(even, odd, _CMP_UNORD_Q);
    }
    for (int64_t s = seen_by_all; s < positions; s++) {
        const __m512i position = _mm512_set1_epi32((int)(from + s));
        __mmask16 seen = _mm512_cmple_epi32_mask(position, newest);
        if (attention.window) seen &= _mm512_cmpgt_epi32_mask(position, oldest);
        const __m512 score = _mm512_mask_blend_ps(seen, hidden, _mm512_load_ps(scores + s * TILE));
        _mm512_store_ps(scores + s * TILE, score);
        most[0] = _mm512_max_ps(most[0], score);
        lost |= _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q);
    }
    const __m512 largest = _mm512_max_ps(most[0], most[1]);
    __m512 offset = Exponential(attention.scale).offset(largest);
    const __mmask16 far = _mm512_cmp_ps_mask(_mm512_abs_ps(offset), _mm512_set1_ps(Exponential::FAR), _CMP_NLT_UQ);
    if (far) {
        for (int64_t s = 0; s < positions * TILE; s += TILE) {
            const __m512 score = _mm512_load_ps(scores + s), moved = _mm512_mask_sub_ps(score, far, score, largest);
            _mm512_store_ps(scores + s, moved);
            lost |= _mm512_cmp_ps_mask(moved, moved, _CMP_UNORD_Q);
        }
        offset = _mm512_mask_mov_ps(offset, far, _mm512_setzero_ps());
    }
    const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
    return _mm512_mask_mov_ps(Exponential::shift_of(offset), lost, nan);
}

// V is asked for a while before it is used, line by line, between other work.
struct Soon {
    const Pool &pool;
    const Row &row;
    int64_t kv_head, heads, layer, head, at, end;  // the next line's, counted from kv_head, and where there are no more

    void line() {
        if (at >= end) return;
        const char *line = pool.line(row.table, at, kv_head + head, layer, 1);
        for (int64_t byte = 0; byte < pool.head_dim * pool.item_bytes; byte += 64) _mm_prefetch(line + byte, _MM_HINT_T0);
        if (++head < heads) return;
        head = 0;
        at++;
    }
    void lines(int64_t count) {
        for (int64_t i = 0; i < count; i++) line();
    }
};

// Scores [position][query] of one tile of queries to weights, as rows of the product with V: per 32 positions
// [16 queries][32 positions]. `positions` is a multiple of 16; a group's missing half is zero.
inline void soften(const float *scores, int64_t positions, __m512 shift, const Attention &attention, Soon &soon, bf16 *rows) {
    const Exponential weight(attention.scale);
    const __m512i paired = _mm512_load_si512(PAIRED);
    for (int64_t s = 0; s < positions; s += STEP, rows += B_TILE) {
        __m512i pair[TILE];
        const int pairs = positions - s < STEP ? TILE / 2 : TILE;
        for (int i = 0; i < pairs; i++) {
            const float *at = scores + (s + 2 * i) * TILE;
            const __m512i both = weight.operator()<true>(_mm512_load_ps(at), _mm512_load_ps(at + TILE), shift);
            pair[i] = _mm512_permutexvar_epi16(paired, both);
            soon.lines(soon.heads);
        }
        for (int i = pairs; i < TILE; i++) pair[i] = _mm512_setzero_si512();
        transpose16(pair);
        for (int i = 0; i < TILE; i++) _mm512_store_si512(rows + i * STEP, pair[i]);
    }
}

// V of positions [from, from + positions) as B: per 32 positions [head_dim / 16][16 lines][16 dims][2]. Lines from
// `end` on were never written and may hold anything: they count as zero. `beside`: a little other work for two positions.
template <bool INT8, class Beside>
inline void pack_values(const Pool &pool, const Row &row, int64_t kv_head, int64_t layer, int64_t from, int64_t positions,
                        int64_t end, bf16 *packed, Beside &&beside) {
    // Words 0-15 of either line alternate, then words 16-31.
    const __m512i apart = _mm512_set1_epi32(16 << 16), alternate = _mm512_load_si512(ALTERNATE);
    const __m512i low = _mm512_add_epi16(alternate, apart), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int64_t dim = pool.head_dim;
    for (int64_t s = 0; s < positions; s += 2) {
        bf16 *to = packed + s / STEP * dim * STEP + s % STEP / 2 * STEP;
        const int64_t left = end - from - s;
        const char *even = left > 0 ? pool.line(row.table, from + s, kv_head, layer, 1) : nullptr;
        const char *odd = left > 1 ? even + dim * (INT8 ? 1 : sizeof(bf16)) : nullptr;
        const float *scale = INT8 && left > 0 ? pool.scale(row.table, from + s, kv_head, layer, 1) : nullptr;
        for (int64_t d = 0; d < dim; d += STEP) {
            const __m512i a = left > 0 ? load_line<INT8>(even, d, INT8 ? scale[0] : 1) : _mm512_setzero_si512();
            const __m512i b = left > 1 ? load_line<INT8>(odd, d, INT8 ? scale[1] : 1) : _mm512_setzero_si512();
            _mm512_store_si512(to + d / TILE * B_TILE, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(to + (d / TILE + 1) * B_TILE, _mm512_permutex2var_epi16(a, high, b));
        }
        beside();
    }
}

// K of positions [from, from + positions) of one head as bf16, [positions][head_dim]; lines from `end` on are zero.
inline void open_keys(const Pool &pool, const Row &row, int64_t kv_head, int64_t layer, int64_t from, int64_t positions,
                      int64_t end, bf16 *opened) {
    for (int64_t s = 0; s < positions; s++, opened += pool.head_dim) {
        const bool written = from + s < end;
        const char *line = written ? pool.line(row.table, from + s, kv_head, layer, 0) : nullptr;
        const float scale = written ? *pool.scale(row.table, from + s, kv_head, layer, 0) : 0;
        for (int64_t d = 0; d < pool.head_dim; d += STEP)
            _mm512_store_si512(opened + d, written ? load_line<true>(line, d, scale) : _mm512_setzero_si512());
    }
}

// The keys of 16 positions from `from + s` on, of the tile's head `h`: as they lie in the pool, or as they were opened.
struct Keys {
    const Pool &pool;
    const Row &row;
    int64_t kv_head, layer, from;
    const bf16 *opened;  // [heads][most][head_dim], or null
    int64_t most;

    const bf16 *at(int64_t h, int64_t s) const {
        if (opened) return opened + (h * most + s) * pool.head_dim;
        return (const bf16 *)pool.line(row.table, from + s, kv_head + h, layer, 0);
    }
    // What is in no cache yet is asked for ahead.
    void prefetch(int64_t h, int64_t s) const {
        const char *lines = pool.line(row.table, from + s, kv_head + h, layer, 0);
        for (int64_t byte = 0; byte < TILE * pool.head_dim * pool.item_bytes; byte += 64)
            _mm_prefetch(lines + byte, _MM_HINT_T0);
    }
};

// One tile: up to 16 queries of `heads` kv heads, `each` per head, from pair `first` on. One head, or all there is of
// several: a sequence that decodes has few queries per head.
struct Tile16 {
    int64_t kv_head, heads, each, first, group;

    int64_t queries() const { return heads * each; }
    int64_t token(int64_t i) const { return (first + i % each) / group; }
    int64_t head(int64_t i) const { return (kv_head + i / each) * group + (first + i % each) % group; }
};

// The queries as B, for each kv head [head_dim / 32][16 lines][16 queries][2], zero where a query is another head's.
// `q`: [tokens, query heads, head_dim].
inline void pack_queries(const bf16 *q, const Row &row, const Tile16 &tile, int64_t query_heads, int64_t dim, bf16 *packed) {
    for (int64_t h = 0; h < tile.heads; h++)
        for (int64_t d = 0; d < dim; d += STEP, packed += B_TILE) {
            __m512i line[TILE];
            for (int64_t i = 0; i < TILE; i++) {
                line[i] = _mm512_setzero_si512();
                if (i / tile.each != h) continue;
                line[i] = _mm512_loadu_si512(q + ((row.first_token + tile.token(i)) * query_heads + tile.head(i)) * dim + d);
            }
            transpose16(line);
            for (int64_t r = 0; r < TILE; r++) _mm512_store_si512(packed + r * STEP, line[r]);
        }
}

// S [positions][16]. Blocks hold a multiple of 16 positions. `fresh`: K and V of this row are in no cache yet.
template <bool AMX>
inline void score(const Keys &all, const Tile16 &tile, int64_t positions, const bf16 *queries, bool fresh, float *scores) {
    const int64_t dim = all.pool.head_dim, steps = dim / STEP;
    if (AMX) configure_tiles(TILE, 0);
    for (int64_t s = 0; s < positions; s += TILE) {
        float *to = scores + s * TILE;
        if (AMX) _tile_zero(0);
        for (int64_t h = 0; h < tile.heads; h++) {
            const bf16 *keys = all.at(h, s), *b = queries + h * steps * B_TILE;
            if (fresh && s + 2 * TILE < positions) all.prefetch(h, s + 2 * TILE);
            if (AMX) {
                for (int64_t k = 0; k < steps; k++) {
                    tile_load(6, b + k * B_TILE, 64);
                    tile_load(4, keys + k * STEP, dim * sizeof(bf16));
                    _tile_dpbf16ps(0, 4, 6);
                }
            } else if (h == 0) {
                multiply_avx512<false>(keys, dim, STEP, b, B_TILE, steps, TILE, to, TILE);
            } else {
                multiply_avx512<true>(keys, dim, STEP, b, B_TILE, steps, TILE, to, TILE);
            }
        }
        if (AMX) _tile_stored(0, to, 64);
    }
}

// How many kv heads of a row are worked on together.
inline int64_t heads_together(const Row &row, int64_t group, int64_t kv_heads) {
    const int64_t fit = TILE / (row.tokens * group);
    return fit < 1 ? 1 : fit < kv_heads ? fit : kv_heads;
}

// Pairs [begin, pairs) of kv heads [kv_head, kv_head + heads) of one row, a tile at a time. `out`: packed rows of [tokens,
// query heads * head_dim]. KV in int8 is opened to bf16 once for all tiles.
template <bool AMX, bool INT8>
void attend(const Pool &pool, const Row &row, int64_t kv_head, int64_t heads, int64_t layer, const Attention &attention,
            const bf16 *q, int64_t begin, int64_t pairs, bf16 *out, Scratch &scratch) {
    const int64_t dim = pool.head_dim, group = attention.heads / pool.kv_heads, end = row.start + row.tokens;
    const int64_t reach = attention.window ? row.start - attention.window + 1 : 0;
    const int64_t from = (reach > 0 ? reach : 0) / STEP * STEP;
    const int64_t most = ceil_div(end - from, STEP) * STEP;  // positions, in groups of 32
    const int64_t query_floats = heads * TILE * dim / 2, key_floats = INT8 ? heads * most * dim / 2 : 0;
    float *scores = scratch.at_least(most * TILE + FEW * TILE / 2 + TILE * (dim + TILE) + query_floats + FEW * dim / 2 +
                                     key_floats);
    bf16 *weights = (bf16 *)(scores + most * TILE), *values = weights + FEW * TILE, *queries = values + FEW * dim;
    float *mixed = (float *)(queries + 2 * query_floats);
    bf16 *opened = INT8 ? (bf16 *)(mixed + TILE * (dim + TILE)) : nullptr;
    for (int64_t h = 0; INT8 && h < heads; h++)
        open_keys(pool, row, kv_head + h, layer, from, most, end, opened + h * most * dim);
    const Keys keys = {pool, row, kv_head, layer, from, opened, most};

    for (int64_t first = begin; first < pairs; first += TILE) {
        const Tile16 tile = {kv_head, heads, pairs - first < TILE ? pairs - first : TILE, first, group};
        alignas(64) int32_t position[TILE];
        for (int64_t i = 0; i < TILE; i++)
            position[i] = (int32_t)(row.start + tile.token(i < tile.queries() ? i : tile.each - 1));
        const int64_t last = row.start + tile.token(tile.each - 1);  // what follows it none of these may see
        const int64_t positions = ((last - from) / TILE + 1) * TILE;
        pack_queries(q, row, tile, attention.heads, dim, queries);
        score<AMX>(keys, tile, positions, queries, first == begin && !INT8, scores);
        const __m512 shift = shifts_of(scores, positions, from, position, attention);
        Soon soon = {pool, row, kv_head, heads, layer, 0, from, from + positions < end ? from + positions : end};
        soon.lines(FEW * heads);
        if (AMX) configure_tiles(tile.each, tile.each);
        for (int64_t s = 0; s < positions; s += FEW) {
            const int64_t some = positions - s < FEW ? positions - s : FEW, steps = ceil_div(some, STEP);
            soften(scores + s * TILE, some, shift, attention, soon, weights);
            for (int64_t h = 0; h < heads; h++) {
                pack_values<INT8>(pool, row, kv_head + h, layer, from + s, steps * STEP, end, values, [&] { soon.line(); });
                const auto add = s == 0 ? weigh<AMX, true> : weigh<AMX, false>;
                add(weights + h * tile.each * STEP, values, tile.each, steps, dim, mixed + h * tile.each * (dim + TILE));
            }
        }
        for (int64_t i = 0; i < tile.queries(); i++) {
            const int64_t before = i / tile.each * tile.each;  // queries of the heads before its own
            finish_query(mixed + before * (dim + TILE), tile.each, i - before, dim,
                         packed_at(out, attention.heads * dim / STEP, row.first_token + tile.token(i), tile.head(i) * dim));
        }
    }
    if (AMX) _tile_release();
}
