// y = x W^T + b for weights of 8 or 4 bits. Both sides of a product are whole numbers for 64 inputs at a time, each side
// with a scale for those 64; their sums are exact, so AMX and AVX-512 give the same bits.
//
// Packed weight: panels of 32 outputs, each panel [I / 64 steps][2 tiles][16 lines][16 outputs][4 inputs] of 8 bits. With
// 4 bits byte i of a tile holds value i and value i + 512, both raised by 8. Scales: [panels][I / 64][32].
// Packed rows: [T / 16][I / 64][16 rows][64 inputs] of 8 bits; scales [T][I / 64].
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

// Packed rows of bfloat16 (linear.h) to 8 bits.
inline QuantisedRows quantise_rows(const bf16 *x, int64_t tokens, int64_t inputs, Scratch &scratch) {
    const int64_t groups = inputs / GROUP, tiles = ceil_div(tokens, TILE);
    float *memory = scratch.at_least(tiles * groups * (Q_TILE / 4 + TILE));
    const QuantisedRows to = {(int8_t *)memory, memory + tiles * groups * Q_TILE / 4};
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t g = 0; g < groups; g++) {
            const bf16 *from = x + (token / TILE * 2 * groups + 2 * g) * B_TILE + token % TILE * STEP;
            __m512 value[4];
            for (int i = 0; i < 4; i++) value[i] = load_bf16(from + i / 2 * B_TILE + i % 2 * TILE);
            const __m512 largest = _mm512_max_ps(_mm512_max_ps(_mm512_abs_ps(value[0]), _mm512_abs_ps(value[1])),
                                                 _mm512_max_ps(_mm512_abs_ps(value[2]), _mm512_abs_ps(value[3])));
            const float most = _mm512_reduce_max_ps(largest);
            const __m512 factor = _mm512_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
            int8_t *line = to.rows + (token / TILE * groups + g) * Q_TILE + token % TILE * GROUP;
            for (int i = 0; i < 4; i++)
                _mm_storeu_si128((__m128i *)(line + 16 * i),
                                 _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(value[i], factor))));
            to.scale[token * groups + g] = most / 127.0f;
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

// Sums of 32 outputs for up to 32 rows [token, token + rows), token a multiple of 16, into c [32][32].
template <bool AMX>
inline void quantised_product(const Linear &w, int64_t panel, const QuantisedRows &x, int64_t token, int64_t rows, float *c) {
    const int64_t groups = w.inputs / GROUP, tile_bytes = Q_TILE * w.bits / 8, first = rows < TILE ? rows : TILE;
    const uint8_t *weight = (const uint8_t *)w.weight + panel * groups * 2 * tile_bytes;
    const int8_t *x0 = x.rows + token / TILE * groups * Q_TILE, *x1 = x0 + groups * Q_TILE;
    alignas(64) int8_t opened[2][Q_TILE];
    alignas(64) int32_t sums[2][PANEL * PANEL];  // taken in turns
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < PANEL; n += TILE) _mm512_store_ps(c + m * PANEL + n, _mm512_setzero_ps());
    for (int64_t g = 0; g < groups; g++, weight += 2 * tile_bytes) {
        fetch_ahead(weight, 2 * tile_bytes);
        const int8_t *b0 = (const int8_t *)weight, *b1 = b0 + tile_bytes;
        if (w.bits == 4) {
            open_tile_4(weight, opened[0]);
            open_tile_4(weight + tile_bytes, opened[1]);
            b0 = opened[0];
            b1 = opened[1];
        }
        int32_t *s = sums[g % 2];
        if (AMX) {
            _tile_zero(0);
            _tile_zero(1);
            tile_load(6, b0, 64);
            tile_load(7, b1, 64);
            tile_load(4, x0 + g * Q_TILE, GROUP);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_stored(0, s, PANEL * 4);
            _tile_stored(1, s + TILE, PANEL * 4);
            if (rows > TILE) {
                _tile_zero(2);
                _tile_zero(3);
                tile_load(5, x1 + g * Q_TILE, GROUP);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
                _tile_stored(2, s + TILE * PANEL, PANEL * 4);
                _tile_stored(3, s + TILE * PANEL + TILE, PANEL * 4);
            }
        } else {
            for (int64_t m = 0; m < rows; m += TILE) {
                const int64_t count = m ? rows - TILE : first;
                whole_sums((m ? x1 : x0) + g * Q_TILE, b0, count, s + m * PANEL);
                whole_sums((m ? x1 : x0) + g * Q_TILE, b1, count, s + m * PANEL + TILE);
            }
        }
        const float *scale = w.scale + (panel * groups + g) * PANEL;
        const __m512 scale0 = _mm512_loadu_ps(scale), scale1 = _mm512_loadu_ps(scale + TILE);
        for (int64_t m = 0; m < rows; m++) {
            const __m512 row = _mm512_set1_ps(x.scale[(token + m) * groups + g]);
            float *to = c + m * PANEL;
            const __m512 sum0 = _mm512_cvtepi32_ps(_mm512_load_si512(s + m * PANEL));
            const __m512 sum1 = _mm512_cvtepi32_ps(_mm512_load_si512(s + m * PANEL + TILE));
            _mm512_store_ps(to, _mm512_fmadd_ps(sum0, _mm512_mul_ps(row, scale0), _mm512_load_ps(to)));
            _mm512_store_ps(to + TILE, _mm512_fmadd_ps(sum1, _mm512_mul_ps(row, scale1), _mm512_load_ps(to + TILE)));
        }
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
