// Products of 16 x 16 tiles: bfloat16 in, float32 out. Two kinds of machine, one shape of code.
//
//   C[m][n] = sum over k of A[m][k] B[k][n]      m < 16 rows, n < 16 columns, k in steps of 32
//
// A is plain rows. B is in the order that both instruction sets want: per step 16 lines of 64 bytes, line r holding the
// pairs (k = 2r, 2r + 1) of all 16 columns. Every element is summed over k in the same order however many rows there
// are, so a row's result never depends on what else is in the batch.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

typedef uint16_t bf16;

constexpr int64_t TILE = 16;
constexpr int64_t STEP = 32;                // k per step
constexpr int64_t B_TILE = TILE * STEP;     // elements of one step of B, and of A when its rows lie together

constexpr float WHOLE = 12582912.0f;        // 1.5 * 2^23: floats of this size have no fraction

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load_bf16(const bf16 *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }
inline void store_bf16(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0-3 are sums, 4 and 5 rows of A, 6 and 7 of B. `first` and `second`: rows of the two A tiles (second may be 0).
inline void configure_tiles(int64_t first, int64_t second) {
    TileConfig config;
    const int64_t rows[8] = {first, first, second, second, first, second, TILE, TILE};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)(rows[i] ? rows[i] : 1);
        config.row_bytes[i] = 64;
    }
    asm volatile("" : : "r"(&config) : "memory");  // gcc is told of its first 8 bytes alone
    _tile_loadconfig(&config);
}

// The intrinsics of gcc 12 do not tell the compiler that memory is read: it might move a store past them.
#define tile_load_as(instruction, tile, from, stride)                      \
    asm volatile(#instruction " (%0,%1,1), %%tmm" #tile                    \
                 :                                                         \
                 : "r"(from), "r"((int64_t)(stride)), "m"(*(const char(*)[])(from)))
#define tile_load(tile, from, stride) tile_load_as(tileloadd, tile, from, stride)
#define tile_load_once(tile, from, stride) tile_load_as(tileloaddt1, tile, from, stride)  // kept in no near cache

// Weights are read once a step, from one end to the other. While `bytes` (a multiple of 256) at `from` are at work, as many
// of the next 16 kB are fetched: a quarter of them from each quarter, since the hardware reads ahead page by page and
// several pages at a time are faster than one.
inline void fetch_ahead(const void *from, int64_t bytes) {
    constexpr uint64_t QUARTER = 4096, WINDOW = 4 * QUARTER;
    const uint64_t at = (uint64_t)from, next = (at & ~(WINDOW - 1)) + WINDOW + (at & (WINDOW - 1)) / 4;
    for (uint64_t quarter = 0; quarter < WINDOW; quarter += QUARTER)
        for (int64_t byte = 0; byte < bytes / 4; byte += 64)
            _mm_prefetch((const char *)(next + quarter + byte), _MM_HINT_T0);
}

// The same product in AVX-512: `ROWS` running sums, each line of B used for all of them.
template <int ROWS, bool ADD>
inline void multiply_rows(const bf16 *a, int64_t a_row, int64_t a_step, const bf16 *b, int64_t b_step, int64_t steps,
                          int64_t rows, float *c, int64_t c_row, bool fetch) {
    __m512 sum[ROWS];
    for (int m = 0; m < ROWS; m++) sum[m] = ADD && m < rows ? _mm512_loadu_ps(c + m * c_row) : _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; k++) {
        if (fetch) fetch_ahead(b + k * b_step, b_step * sizeof(bf16));
        for (int r = 0; r < TILE; r++) {
            const __m512bh line = (__m512bh)_mm512_loadu_si512(b + k * b_step + r * STEP);
            for (int m = 0; m < ROWS; m++) {
                int32_t pair;
                memcpy(&pair, a + m * a_row + k * a_step + 2 * r, sizeof pair);
                sum[m] = _mm512_dpbf16_ps(sum[m], (__m512bh)_mm512_set1_epi32(pair), line);
            }
        }
    }
    for (int m = 0; m < rows; m++) _mm512_storeu_ps(c + m * c_row, sum[m]);
}

// `a` must be readable for the next power of two of `rows`. ADD: to what is in c. `fetch`: all of b's steps, ahead.
template <bool ADD>
inline void multiply_avx512(const bf16 *a, int64_t a_row, int64_t a_step, const bf16 *b, int64_t b_step, int64_t steps,
                            int64_t rows, float *c, int64_t c_row, bool fetch = false) {
    if (rows == 1) return multiply_rows<1, ADD>(a, a_row, a_step, b, b_step, steps, rows, c, c_row, fetch);
    if (rows == 2) return multiply_rows<2, ADD>(a, a_row, a_step, b, b_step, steps, rows, c, c_row, fetch);
    if (rows <= 4) return multiply_rows<4, ADD>(a, a_row, a_step, b, b_step, steps, rows, c, c_row, fetch);
    if (rows <= 8) return multiply_rows<8, ADD>(a, a_row, a_step, b, b_step, steps, rows, c, c_row, fetch);
    multiply_rows<16, ADD>(a, a_row, a_step, b, b_step, steps, rows, c, c_row, fetch);
}

// 16 x 16 double words: out[j][i] = in[i][j].
inline void transpose16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    }
}

// 2^x for x <= 0, to 1e-7 relative; minus infinity and anything below -200 give exactly 0.
inline __m512 exp2_nonpositive(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(0.00132647f);  // the polynomial of degree 5 with the smallest relative error
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00967151f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05550734f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24022242f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69314698f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// 1 / x for normal x > 0: the CPU's estimate (14 bits) and one step of Newton's method.
inline __m512 reciprocal(__m512 x) {
    const __m512 estimate = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(estimate, _mm512_fnmadd_ps(x, estimate, _mm512_set1_ps(2.0f)));
}

// x * sigmoid(x).
inline __m512 silu(__m512 x) {
    const __m512 log2e = _mm512_set1_ps(1.442695040888963f);
    const __m512 magnitude = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.0f));
    const __m512 e = exp2_nonpositive(_mm512_mul_ps(magnitude, log2e));  // exp(-|x|)
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 above = _mm512_mask_blend_ps(negative, _mm512_set1_ps(1.0f), e);
    return _mm512_mul_ps(_mm512_mul_ps(x, above), reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}
