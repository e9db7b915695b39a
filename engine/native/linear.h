// y = x W^T + b for weights that are packed once. What follows a product is done while its sums are at hand.
//
// Packed weight: panels of 32 outputs, each panel [I / 32 steps][2 tiles][16 lines][16 outputs][2 inputs]: one stream.
// Packed rows: x as [T / 16][I / 32 steps][16 rows][32 inputs], so that every tile of x is 1 kB in a row.
#pragma once

#include "quantised_products.h"

constexpr int64_t GROUP_BYTES = 160 * 1024;

enum class Then { STORE, ADD, SWIGLU };  // y = sums; y += sums; y = silu(gate) * up, packed as rows of the next product

inline int64_t row_tiles(int64_t tokens) { return ceil_div(tokens, TILE); }
inline bf16 *packed_at(bf16 *rows, int64_t steps, int64_t token, int64_t input) {
    return rows + ((token / TILE) * steps + input / STEP) * B_TILE + (token % TILE) * STEP + input % STEP;
}

// The weights that come next are on their way to the second-level cache while those before them are used, row after row:
// at every step of a panel (2 kB; 1 kB of 4 bits) as much of them as makes them all be there when they are needed.
struct Ahead {
    const char *at, *end;
    int64_t bytes;  // a step

    Ahead(const char *from, int64_t all, int64_t step_bytes, int64_t blocks_of_rows)
        : at(from), end(from + all), bytes(ceil_div(step_bytes, blocks_of_rows * 64) * 64) {}

    void operator()() {
        for (int64_t done = 0; done < bytes && at < end; done += 64, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Sums of 32 outputs for up to 32 rows, stored to (ADD: added to what is in) `c`, rows of which are `c_row` apart.
// `beside`: a little other work, done at every step while the tiles multiply.
template <bool AMX, bool ADD, class Beside>
inline void panel_product(const bf16 *x, int64_t rows, const bf16 *panel, int64_t steps, bool prefetch, float *c,
                          int64_t c_row, Beside &&beside) {
    const bf16 *x1 = x + steps * B_TILE;
    if (!AMX) {
        for (int64_t done = 0; done < rows; done += TILE) {
            const int64_t m = rows - done < TILE ? rows - done : TILE;
            for (int tile = 0; tile < 2; tile++)
                multiply_avx512<ADD>(done ? x1 : x, STEP, B_TILE, panel + tile * B_TILE, 2 * B_TILE, steps, m,
                                     c + done * c_row + tile * TILE, c_row, prefetch && !done && !tile);
        }
        return;
    }
    const bool two = rows > TILE;
    const int64_t stride = c_row * sizeof(float);
    float *c1 = c + TILE * c_row;
    if (ADD) {
        tile_load(0, c, stride);
        tile_load(1, c + TILE, stride);
        if (two) {
            tile_load(2, c1, stride);
            tile_load(3, c1 + TILE, stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++) {
        const bf16 *b = panel + k * 2 * B_TILE;
        if (prefetch) {
            fetch_ahead(b, 2 * B_TILE * sizeof(bf16));
            tile_load(6, b, 64);
            tile_load(7, b + B_TILE, 64);
        } else {  // x, which panel after panel uses, stays in the first-level cache; there is no room for both
            tile_load_once(6, b, 64);
            tile_load_once(7, b + B_TILE, 64);
        }
        tile_load(4, x + k * B_TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            tile_load(5, x1 + k * B_TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        beside();
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + TILE, stride);
    if (two) {
        _tile_stored(2, c1, stride);
        _tile_stored(3, c1 + TILE, stride);
    }
}

// Sums of a panel, 16 gates and their 16 ups, of rows [token, token + rows), to 16 inputs of the next product: a row at
// a time.
struct Swiglu {
    const float *c;
    const float *bias;
    int64_t rows;
    bf16 *packed;
    int64_t steps, token, input, done = 0;

    void row() {
        const __m512 zero = _mm512_setzero_ps();
        const __m512 gate = _mm512_add_ps(_mm512_load_ps(c + done * PANEL), bias ? _mm512_loadu_ps(bias) : zero);
        const __m512 up = _mm512_add_ps(_mm512_load_ps(c + done * PANEL + TILE), bias ? _mm512_loadu_ps(bias + TILE) : zero);
        store_bf16(packed_at(packed, steps, token + done, input), _mm512_mul_ps(silu(gate), up));
        done++;
    }

    void some() {
        for (int i = 0; i < 2 && done < rows; i++) row();
    }

    void rest() {
        while (done < rows) row();
    }
};

inline Swiglu swiglu_of(const Linear &w, const float *c, int64_t first, int64_t token, int64_t rows, void *y) {
    return {c, w.bias ? w.bias + first : nullptr, rows, (bf16 *)y, w.outputs / 2 / STEP, token, first / 2};
}

// c, with the bias, to where it belongs: for products whose sums did not go there by themselves.
template <Then THEN>
inline void finish(const Linear &w, const float *c, int64_t first, int64_t token, int64_t rows, void *y) {
    if (THEN == Then::SWIGLU) {
        swiglu_of(w, c, first, token, rows, y).rest();
        return;
    }
    const int64_t width = w.outputs - first < PANEL ? w.outputs - first : PANEL;
    for (int64_t n = 0; n < width; n += TILE) {
        const __mmask16 some = width - n < TILE ? (__mmask16)((1 << (width - n)) - 1) : (__mmask16)-1;
        const __m512 bias = w.bias ? _mm512_maskz_loadu_ps(some, w.bias + first + n) : _mm512_setzero_ps();
        float *to = (float *)y + token * w.outputs + first + n;
        for (int64_t m = 0; m < rows; m++, to += w.outputs) {
            const __m512 sum = _mm512_add_ps(_mm512_load_ps(c + m * PANEL + n), bias);
            _mm512_mask_storeu_ps(to, some, THEN == Then::ADD ? _mm512_add_ps(sum, _mm512_maskz_loadu_ps(some, to)) : sum);
        }
    }
}

// Panels [first, last) for rows [token, token + rows), in three kinds.
template <bool AMX, Then THEN>
inline void quantised_panels(const Linear &w, int64_t first, const QuantisedPanels &panels, const QuantisedRows &x, int64_t token,
                             int64_t rows, void *y, bool prefetch, bool many, Ahead &ahead) {
    const Block block = {x, token, rows, panels.groups};
    quantised_products<AMX>(panels, block, prefetch, many, ahead, [&](int64_t panel, const float *c) {
        finish<THEN>(w, c, (first + panel) * PANEL, token, rows, y);
    });
}

template <bool AMX, Then THEN>
inline void plain_panel(const Linear &w, int64_t panel, const bf16 *x, int64_t token, int64_t rows, void *y, bool prefetch,
                        Ahead &ahead) {
    const int64_t steps = w.inputs / STEP, first = panel * PANEL;
    const bf16 *weight = (const bf16 *)w.weight + panel * steps * 2 * B_TILE;
    const bf16 *from = x + token / TILE * steps * B_TILE;
    if (w.outputs - first < PANEL) {
        alignas(64) float c[PANEL * PANEL];
        panel_product<AMX, false>(from, rows, weight, steps, prefetch, c, PANEL, ahead);
        finish<THEN>(w, c, first, token, rows, y);
        return;
    }
    float *to = (float *)y + token * w.outputs + first;
    for (int64_t m = 0; w.bias && m < rows; m++)
        for (int64_t n = 0; n < PANEL; n += TILE) {
            const __m512 bias = _mm512_loadu_ps(w.bias + first + n);
            float *at = to + m * w.outputs + n;
            _mm512_storeu_ps(at, THEN == Then::ADD ? _mm512_add_ps(_mm512_loadu_ps(at), bias) : bias);
        }
    if (THEN == Then::ADD || w.bias)
        panel_product<AMX, true>(from, rows, weight, steps, prefetch, to, w.outputs, ahead);
    else
        panel_product<AMX, false>(from, rows, weight, steps, prefetch, to, w.outputs, ahead);
}

template <bool AMX, Then THEN>
inline void plain_panels(const Linear &w, int64_t first, int64_t last, const bf16 *x, int64_t token, int64_t rows, void *y,
                         bool prefetch, Ahead &ahead) {
    for (int64_t panel = first; panel < last; panel++)
        plain_panel<AMX, THEN>(w, panel, x, token, rows, y, prefetch, ahead);
}

// Gates and ups: each panel is activated while the next is multiplied.
template <bool AMX>
inline void gated_panels(const Linear &w, int64_t first, int64_t last, const bf16 *x, int64_t token, int64_t rows, void *y,
                         bool prefetch, Ahead &ahead) {
    const int64_t steps = w.inputs / STEP;
    const bf16 *from = x + token / TILE * steps * B_TILE;
    alignas(64) float c[2][PANEL * PANEL];  // taken in turns
    Swiglu before = {};
    for (int64_t panel = first; panel < last; panel++) {
        const bf16 *weight = (const bf16 *)w.weight + panel * steps * 2 * B_TILE;
        panel_product<AMX, false>(from, rows, weight, steps, prefetch, c[panel % 2], PANEL, [&] {
            ahead();
            before.some();
        });
        before.rest();
        before = swiglu_of(w, c[panel % 2], panel * PANEL, token, rows, y);
    }
    before.rest();
}

// `x`: packed rows of `tokens` tokens. `y`: float32 [tokens, outputs], or packed rows for SWIGLU.
// Panels go in groups: for 32 rows all of a group, so that y is written in long runs. A group, the next one and all of x
// have room in the second-level cache.
template <bool AMX, Then THEN>
void apply(const Linear &w, const bf16 *x, int64_t tokens, void *y, int threads) {
    static Scratch small_rows;  // one caller at a time
    const int64_t panels = ceil_div(w.outputs, PANEL), panel_bytes = w.inputs * PANEL * w.bits / 8;
    const int64_t step_bytes = w.bits == 4 ? Q_TILE : 2 * Q_TILE;
    const int64_t fits = GROUP_BYTES / panel_bytes > 0 ? GROUP_BYTES / panel_bytes : 1;
    const int64_t group = fits * threads < panels ? fits : ceil_div(panels, threads);
    const int64_t blocks = ceil_div(tokens, PANEL);  // of rows
    const bool many = blocks > 1, ahead_pays = AMX && many;
    QuantisedRows small = {nullptr, nullptr};
    if (w.bits != 16) small = quantise_rows(x, tokens, w.inputs, small_rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local Scratch opened;
        int64_t configured = -1, fetched = -1;  // the group that is in the cache
#pragma omp for schedule(static)
        for (int64_t first = 0; first < panels; first += group) {
            const int64_t last = first + group < panels ? first + group : panels;
            const int64_t next = last + group < panels ? last + group : panels;
            Ahead ahead((const char *)w.weight + last * panel_bytes, ahead_pays ? (next - last) * panel_bytes : 0,
                        step_bytes, blocks);
            QuantisedPanels quantised = {};
            if (w.bits != 16) quantised = panels_of(w, first, last);
            const bool open = w.bits == 4 && many;
            if (open) quantised = open_panels(quantised, fetched != first, opened);
            for (int64_t token = 0; token < tokens; token += PANEL) {
                const bool prefetch = token == 0 && fetched != first;
                const int64_t rows = tokens - token < PANEL ? tokens - token : PANEL;
                if (AMX && rows != configured) {
                    configure_tiles(rows < TILE ? rows : TILE, rows > TILE ? rows - TILE : 0);
                    configured = rows;
                }
                if (w.bits == 16 && THEN == Then::SWIGLU)
                    gated_panels<AMX>(w, first, last, x, token, rows, y, prefetch, ahead);
                else if (w.bits == 16)
                    plain_panels<AMX, THEN>(w, first, last, x, token, rows, y, prefetch, ahead);
                else
                    quantised_panels<AMX, THEN>(w, first, quantised, small, token, rows, y, prefetch && !open, many, ahead);
            }
            fetched = ahead_pays ? last : -1;
        }
        if (AMX) _tile_release();
    }
}

// W [outputs, inputs] to panels. `inputs` is a multiple of 32; missing outputs of the last panel are zero.
// `interleave`: W is gates above ups; 16 of either alternate.
inline void pack_weight(const bf16 *weight, int64_t outputs, int64_t inputs, bool interleave, bf16 *packed) {
    const int64_t steps = inputs / STEP;
    for (int64_t panel = 0; panel < ceil_div(outputs, PANEL); panel++)
        for (int tile = 0; tile < 2; tile++) {
            int64_t from = panel * PANEL + tile * TILE;
            if (interleave) from = panel * TILE + tile * (outputs / 2);
            for (int64_t k = 0; k < steps; k++) {
                uint32_t *to = (uint32_t *)(packed + (panel * steps + k) * 2 * B_TILE + tile * B_TILE);
                for (int64_t n = 0; n < TILE; n++)
                    for (int64_t r = 0; r < TILE; r++) {
                        uint32_t pair = 0;
                        if (from + n < outputs) memcpy(&pair, weight + (from + n) * inputs + k * STEP + 2 * r, 4);
                        to[r * TILE + n] = pair;
                    }
            }
        }
}
