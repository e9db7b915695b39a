// Products of quantised rows and weights. Every 64 inputs 32 x 32 whole sums become floats, are scaled and added: that, not
// the tiles, takes the time of many rows. Three things about this CPU (Sapphire Rapids) shape it:
// - Beside tiles one port is left for products and conversions of floats, a second one for whole numbers. So a whole number
//   (of less than 22 bits) becomes a float by an addition to the bits of WHOLE, which makes them those of WHOLE + number.
//   Two products are left, and done while the tiles multiply what comes next.
// - A tile that is stored as soon as it is multiplied waits for the product, and all tiles after it wait as well.
// - A load waits for a store before it that has the same place in any page, and stores of tiles have all places. So nothing
//   that a step needs is kept in memory from the step before, addresses least of all.
#pragma once

#include "quantised.h"

// Where sums of 32 rows by 32 outputs are on their way. A row has the same place in a page in all three, so that what is
// stored and what is loaded meanwhile are 16 rows apart.
struct alignas(4096) Sums {
    int32_t whole[PANEL * PANEL];  // of one group
    float all[2][PANEL * PANEL];   // of all groups so far: of one panel and the next, in turns
};

// What is to be done for 16 rows of a group: all += sum * output's scale * row's scale.
struct Scaling {
    const int32_t *whole;
    const float *scale, *row_scale;
    float *all;
    int64_t rows;

    // As many of the 8 rows from `first` as there are; in whole ones no time is lost with counting.
    inline __attribute__((always_inline)) void eight(int64_t first) const {
        if (first >= rows) return;
        const __m512 scale0 = _mm512_loadu_ps(scale), scale1 = _mm512_loadu_ps(scale + TILE);
        const __m512 raised = _mm512_set1_ps(WHOLE);  // its product with a scale is exact (engine/model/native.py)
        const __m512 lower0 = _mm512_mul_ps(scale0, raised), lower1 = _mm512_mul_ps(scale1, raised);
        const auto scaled = [&](int64_t at, __m512 scale, __m512 lower) __attribute__((always_inline)) {
            const __m512i sum = _mm512_add_epi32(_mm512_load_si512(whole + at), _mm512_castps_si512(raised));
            return _mm512_fmsub_ps(_mm512_castsi512_ps(sum), scale, lower);
        };
        const auto row = [&](int64_t m) __attribute__((always_inline)) {
            const __m512 own = _mm512_set1_ps(row_scale[m]);
            float *to = all + m * PANEL;
            _mm512_store_ps(to, _mm512_fmadd_ps(scaled(m * PANEL, scale0, lower0), own, _mm512_load_ps(to)));
            _mm512_store_ps(to + TILE, _mm512_fmadd_ps(scaled(m * PANEL + TILE, scale1, lower1), own, _mm512_load_ps(to + TILE)));
        };
        if (first + 8 <= rows) {
#pragma GCC unroll 8
            for (int64_t m = 0; m < 8; m++) row(first + m);
            return;
        }
#pragma GCC unroll 1
        for (int64_t m = first; m < rows; m++) row(m);
    }

    inline __attribute__((always_inline)) void sixteen() const {
        eight(0);
        eight(8);
    }
};

// The tiles of one group. `stream`: weights are used once before the rows are used again.
struct GroupTiles {
    const int8_t *x0, *x1, *b0, *b1;
    bool two, stream;
};

// Whole sums of a group into the tiles. Those of the group before stay there until a tile is needed, and are scaled a pair of
// tiles after they were stored: the first 16 rows (`upper`) beside the second pair of products, the others (`lower`) beside the
// first pair of the next group.
inline __attribute__((always_inline)) void tile_sums(const GroupTiles &t, int32_t *whole, const Scaling &upper,
                                                     const Scaling &lower) {
    if (t.stream) {
        tile_load_once(6, t.b0, 64);
        tile_load_once(7, t.b1, 64);
    } else {
        tile_load(6, t.b0, 64);
        tile_load(7, t.b1, 64);
    }
    tile_load(4, t.x0, GROUP);
    _tile_stored(0, whole, PANEL * 4);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    lower.eight(0);
    _tile_stored(1, whole + TILE, PANEL * 4);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    lower.eight(8);
    if (!t.two) {
        upper.sixteen();
        return;
    }
    tile_load(5, t.x1, GROUP);
    _tile_stored(2, whole + TILE * PANEL, PANEL * 4);
    _tile_zero(2);
    _tile_dpbssd(2, 5, 6);
    upper.eight(0);
    _tile_stored(3, whole + TILE * PANEL + TILE, PANEL * 4);
    _tile_zero(3);
    _tile_dpbssd(3, 5, 7);
    upper.eight(8);
}

inline void store_tiles(bool two, int32_t *whole) {
    _tile_stored(0, whole, PANEL * 4);
    _tile_stored(1, whole + TILE, PANEL * 4);
    if (!two) return;
    _tile_stored(2, whole + TILE * PANEL, PANEL * 4);
    _tile_stored(3, whole + TILE * PANEL + TILE, PANEL * 4);
}

// The same in AVX-512.
inline void vector_sums(const GroupTiles &t, int64_t rows, int32_t *whole) {
    for (int64_t m = 0; m < rows; m += TILE) {
        const int64_t count = rows - m < TILE ? rows - m : TILE;
        whole_sums(m ? t.x1 : t.x0, t.b0, count, whole + m * PANEL);
        whole_sums(m ? t.x1 : t.x0, t.b1, count, whole + m * PANEL + TILE);
    }
}

// Consecutive panels: packed weights of 8 or 4 bits, scales [panels][I / 64][32].
struct QuantisedPanels {
    const uint8_t *weight;
    const float *scale;
    int64_t bits, groups, count;
};

inline QuantisedPanels panels_of(const Linear &w, int64_t first, int64_t last) {
    const int64_t groups = w.inputs / GROUP;
    return {(const uint8_t *)w.weight + first * PANEL * w.inputs * w.bits / 8, w.scale + first * groups * PANEL, w.bits, groups,
            last - first};
}

// Panels of 4 bits as such of 8: many rows open them once.
inline QuantisedPanels open_panels(const QuantisedPanels &from, bool prefetch, Scratch &scratch) {
    const int64_t tiles = from.count * from.groups * 2;
    int8_t *opened = (int8_t *)scratch.at_least(tiles * Q_TILE / sizeof(float));
    open_tiles_4(from.weight, tiles, prefetch, opened);
    return {(const uint8_t *)opened, from.scale, 8, from.groups, from.count};
}

// Up to 32 rows [token, token + rows), token a multiple of 16.
struct Block {
    const QuantisedRows &x;
    int64_t token, rows, groups;

    const int8_t *tile(int64_t half, int64_t g) const { return x.rows + ((token / TILE + half) * groups + g) * Q_TILE; }
    Scaling scaling(int64_t half, Sums &sums, const float *scale, int64_t g, float *all) const {
        const int64_t left = rows - half * TILE;
        return {sums.whole + half * TILE * PANEL, scale, x.scale + ((token / TILE + half) * groups + g) * TILE,
                all + half * TILE * PANEL, left < TILE ? left : TILE};
    }
};

// Sums of panel after panel, [32 rows][32 outputs], are handed to `finish`, with the number of the panel. `prefetch`: weights
// come from memory. `many`: there are more rows than these. `beside`: a little other work, done once a group.
template <bool AMX, class Beside, class Finish>
inline void quantised_products(const QuantisedPanels &w, const Block &block, bool prefetch, bool many, Beside &&beside,
                               Finish &&finish) {
    const int64_t groups = w.groups, tile_bytes = Q_TILE * w.bits / 8;
    const uint8_t *weight = w.weight;
    const float *scale = w.scale;
    const bool two = block.rows > TILE;
    const Scaling nothing = {};
    alignas(64) int8_t opened[2][Q_TILE];
    Sums sums;
    int64_t under_way = 0;  // groups, of which the last is in the tiles and the one before half done
    for (int64_t panel = 0; panel < w.count; panel++) {
        float *all = sums.all[panel % 2], *before = sums.all[(panel + 1) % 2];
        for (int64_t i = 0; i < block.rows * PANEL; i += TILE) _mm512_store_ps(all + i, _mm512_setzero_ps());
        for (int64_t g = 0; g < groups; g++, weight += 2 * tile_bytes, scale += PANEL, under_way++) {
            if (prefetch) fetch_ahead(weight, 2 * tile_bytes);
            const int8_t *b0 = (const int8_t *)weight, *b1 = b0 + tile_bytes;
            if (w.bits == 4) {
                open_tiles_4(weight, 2, false, opened[0]);
                b0 = opened[0];
                b1 = opened[1];
            }
            const GroupTiles tiles = {block.tile(0, g), block.tile(1, g), b0, b1, two, many};
            if (AMX) {
                const int64_t last = g > 0 ? g - 1 : groups - 1, earlier = g > 1 ? g - 2 : groups + g - 2;
                tile_sums(tiles, sums.whole,
                          under_way > 0 ? block.scaling(0, sums, scale - PANEL, last, g > 0 ? all : before) : nothing,
                          under_way > 1 ? block.scaling(1, sums, scale - 2 * PANEL, earlier, g > 1 ? all : before) : nothing);
            } else {
                vector_sums(tiles, block.rows, sums.whole);
                for (int half = 0; half < 2; half++) block.scaling(half, sums, scale, g, all).sixteen();
            }
            beside();
            if (g == 1 && panel > 0) finish(panel - 1, before);
        }
        if (groups > 1 && panel + 1 < w.count) continue;
        if (AMX) {
            if (under_way > 1) block.scaling(1, sums, scale - 2 * PANEL, groups - 2, all).sixteen();
            store_tiles(two, sums.whole);
            for (int half = 0; half < 2; half++) block.scaling(half, sums, scale - PANEL, groups - 1, all).sixteen();
        }
        under_way = 0;
        finish(panel, all);
    }
}
