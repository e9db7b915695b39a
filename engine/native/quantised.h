// y = x W^T + b for weights of 8 or 4 bits. Both sides of a product are whole numbers for 64 inputs at a time, each side
// with a scale for those 64; their sums are exact, so AMX and AVX-512 give the same bits.
// What is done with those sums is in quantised_products.h.
//
// Packed weight: panels of 32 outputs, each panel [I / 64 steps][2 tiles][16 lines][16 outputs][4 inputs] of 8 bits. With
// 4 bits byte i of a tile holds value i and value i + 512, both raised by 8. Scales: [panels][I / 64][32].
// Packed rows: [T / 16][I / 64][16 rows][64 inputs] of 8 bits; scales [T / 16][I / 64][16].
#pragma once

#include <vector>

#include "tiles.h"

constexpr int64_t PANEL = 2 * TILE;  // outputs
constexpr int64_t GROUP = 64;        // inputs that share a scale
constexpr int64_t Q_TILE = TILE * GROUP;

struct Linear {
    const void *weight;  // packed, 64-byte aligned
    const float *scale;  // of quantised weights, else null
    const float *bias;   // [outputs] or null
    int64_t inputs, outputs;
    int64_t bits;  // of a weight: 16, 8 or 4
};

// Grows and never shrinks; one per thread and purpose.
struct Scratch {
    std::vector<float> memory;
    float *at_least(size_t floats) {
        if (memory.size() < floats + 16) memory.resize(floats + 16);
        return (float *)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    }
};

struct QuantisedRows {
    int8_t *rows;
    float *scale;
};

// The largest magnitude of 64 bfloat16: without their signs they are in the order of whole numbers.
inline float largest_of(__m512i one, __m512i other) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    const __m512i most = _mm512_max_epu16(_mm512_and_si512(one, magnitude), _mm512_and_si512(other, magnitude));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
    const uint32_t bits = (uint32_t)(~_mm_cvtsi128_si32(least) & 0xffff) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Packed rows of bfloat16 (linear.h) to 8 bits.
inline QuantisedRows quantise_rows(const bf16 *x, int64_t tokens, int64_t inputs, Scratch &scratch) {
    const int64_t groups = inputs / GROUP, tiles = ceil_div(tokens, TILE);
    float *memory = scratch.at_least(tiles * groups * (Q_TILE / 4 + TILE));
    const QuantisedRows to = {(int8_t *)memory, memory + tiles * groups * Q_TILE / 4};
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // packs go by 128 bits
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t g = 0; g < groups; g++) {
            const bf16 *from = x + (token / TILE * 2 * groups + 2 * g) * B_TILE + token % TILE * STEP;
            const float most = largest_of(_mm512_loadu_si512(from), _mm512_loadu_si512(from + B_TILE));
            const __m512 factor = _mm512_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
            __m512i value[4];
            for (int i = 0; i < 4; i++)
                value[i] = _mm512_cvtps_epi32(_mm512_mul_ps(load_bf16(from + i / 2 * B_TILE + i % 2 * TILE), factor));
            const __m512i low = _mm512_packs_epi32(value[0], value[1]), high = _mm512_packs_epi32(value[2], value[3]);
            const __m512i packed = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(low, high));
            _mm512_storeu_si512(to.rows + (token / TILE * groups + g) * Q_TILE + token % TILE * GROUP, packed);
            to.scale[(token / TILE * groups + g) * TILE + token % TILE] = most / 127.0f;
        }
    return to;
}

inline void open_tile_4(const uint8_t *from, int8_t *to) {
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    for (int i = 0; i < 8; i++) {
        const __m512i both = _mm512_loadu_si512(from + 64 * i);
        _mm512_store_si512(to + 64 * i, _mm512_sub_epi8(_mm512_and_si512(both, low), eight));
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_store_si512(to + 512 + 64 * i, _mm512_sub_epi8(high, eight));
    }
}

// Whole sums of one tile of outputs in AVX-512. Its products take one unsigned side: rows are raised by 128, and what that
// adds is taken off again.
template <int ROWS>
inline void whole_sums_of(const int8_t *x, const int8_t *w, int64_t rows, int32_t *c) {
    const __m512i ones = _mm512_set1_epi8(1), raise = _mm512_set1_epi32((int)0x80808080);
    __m512i sum[ROWS], weights = _mm512_setzero_si512();
    for (int m = 0; m < ROWS; m++) sum[m] = _mm512_setzero_si512();
    for (int line = 0; line < TILE; line++) {
        const __m512i b = _mm512_loadu_si512(w + line * GROUP);
        weights = _mm512_dpbusd_epi32(weights, ones, b);
        for (int m = 0; m < ROWS; m++) {
            int32_t four;
            memcpy(&four, x + m * GROUP + 4 * line, 4);
            sum[m] = _mm512_dpbusd_epi32(sum[m], _mm512_xor_si512(_mm512_set1_epi32(four), raise), b);
        }
    }
    const __m512i extra = _mm512_slli_epi32(weights, 7);
    for (int m = 0; m < rows; m++) _mm512_store_si512(c + m * PANEL, _mm512_sub_epi32(sum[m], extra));
}

inline void whole_sums(const int8_t *x, const int8_t *w, int64_t rows, int32_t *c) {
    if (rows == 1) return whole_sums_of<1>(x, w, rows, c);
    if (rows == 2) return whole_sums_of<2>(x, w, rows, c);
    if (rows <= 4) return whole_sums_of<4>(x, w, rows, c);
    if (rows <= 8) return whole_sums_of<8>(x, w, rows, c);
    whole_sums_of<16>(x, w, rows, c);
}

// `tiles` of 4 bits, one after the other, as such of 8.
inline void open_tiles_4(const uint8_t *from, int64_t tiles, bool prefetch, int8_t *to) {
    for (int64_t i = 0; i < tiles; i++, from += Q_TILE / 2, to += Q_TILE) {
        if (prefetch) fetch_ahead(from, Q_TILE / 2);
        open_tile_4(from, to);
    }
}

// int8 [outputs, inputs] to panels; 4 bits are -8 to 7. `inputs` is a multiple of 64.
inline void pack_quantised(const int8_t *weight, int64_t outputs, int64_t inputs, bool interleave, int bits, uint8_t *packed) {
    const int64_t groups = inputs / GROUP;
    int8_t tile[Q_TILE];
    for (int64_t panel = 0; panel < ceil_div(outputs, PANEL); panel++)
        for (int64_t g = 0; g < groups; g++)
            for (int half = 0; half < 2; half++) {
                const int64_t from = interleave ? panel * TILE + half * (outputs / 2) : panel * PANEL + half * TILE;
                for (int64_t line = 0; line < TILE; line++)
                    for (int64_t n = 0; n < TILE; n++) {
                        int8_t *four = tile + line * GROUP + 4 * n;
                        memset(four, 0, 4);
                        if (from + n < outputs) memcpy(four, weight + (from + n) * inputs + g * GROUP + 4 * line, 4);
                    }
                if (bits == 8) {
                    memcpy(packed, tile, Q_TILE);
                } else {
                    for (int64_t i = 0; i < Q_TILE / 2; i++)
                        packed[i] = (uint8_t)((tile[i] + 8) | (tile[i + Q_TILE / 2] + 8) << 4);
                }
                packed += Q_TILE * bits / 8;
            }
}
