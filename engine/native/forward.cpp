// A whole forward of a Llama-family decoder in bfloat16 on a CPU with AVX-512 BF16, with or without AMX.
//
// The residual stream and every sum are float32; weights, KV and what enters a product are bfloat16. Structures are
// filled by engine/model/native.py, which states them a second time: change both.

#include "many_queries.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

extern "C" {

struct HrLayer {
    const float *attention_norm;
    Linear qkv;
    const float *q_norm, *k_norm;  // [head_dim], or null
    Linear output;
    const float *mlp_norm;
    Linear gate_up;  // interleaved
    Linear down;
};

struct HrModel {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size, window;
    float eps;
    int32_t amx, threads, kv_item_bytes;  // KV is bf16, or int8 with scales
    const bf16 *embedding;  // [vocab, hidden]
    const HrLayer *layer;
    const float *norm;
    Linear head;
    char *pool;
};

struct HrStep {
    int64_t tokens, rows, wanted;
    const int64_t *token;        // [tokens]
    const float *cos, *sin;      // [tokens, head_dim]; the first half of sin is negated
    const Row *row;              // [rows]
    const uint8_t *write;        // [rows]
    const int64_t *last;         // [wanted] tokens whose logits are wanted
    float *logits;               // [wanted, vocab]
};
}

namespace {

// 64-byte aligned memory that grows with the largest step.
struct Buffer {
    void *memory = nullptr;
    size_t size = 0;
    template <typename T>
    T *of(size_t count) {
        const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size) {
            free(memory);
            memory = aligned_alloc(4096, bytes);
            size = memory ? bytes : 0;
        }
        return (T *)memory;
    }
    ~Buffer() { free(memory); }
};

constexpr int64_t LONGEST_LINE = 1024;  // engine/model/native.py refuses longer ones in int8

// Where the time of all steps so far went, in cycles of the time stamp counter.
enum Phase { NORM, QKV, HEADS, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, PHASES };
uint64_t spent[PHASES];

struct Watch {
    uint64_t before = __rdtsc();
    void done(Phase phase) {
        const uint64_t now = __rdtsc();
        spent[phase] += now - before;
        before = now;
    }
};

struct Buffers {
    Buffer stream, rows, wide, queries, mixed;
};

// Of a multiple of 32; in four sums, which do not wait for each other.
inline float sum_of_squares(const float *x, int64_t n) {
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t i = 0;
    for (; i + 4 * TILE <= n; i += 4 * TILE)
        for (int k = 0; k < 4; k++) {
            const __m512 v = _mm512_loadu_ps(x + i + k * TILE);
            sum[k] = _mm512_fmadd_ps(v, v, sum[k]);
        }
    for (; i < n; i += TILE) sum[0] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i), sum[0]);
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
}

// RMSNorm (Zhang and Sennrich 2019) of one token's stream into packed row `at`.
void normalise(const float *x, const float *weight, int64_t n, float eps, bf16 *rows, int64_t at) {
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(sum_of_squares(x, n) / (float)n + eps));
    const auto normal = [&](int64_t i) {
        return _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), _mm512_loadu_ps(weight + i));
    };
    bf16 *to = packed_at(rows, n / STEP, at, 0);
    for (int64_t i = 0; i < n; i += STEP, to += B_TILE)
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(normal(i + TILE), normal(i)));
}

// One head: its own norm (Qwen3), then the rotation. `store` gets 16 values at a time.
template <typename Store>
void rotate(const float *x, const float *norm, float eps, const float *cos, const float *sin, int64_t dim, Store store) {
    const int64_t half = dim / 2;
    float factor = 1.0f;
    if (norm) factor = 1.0f / std::sqrt(sum_of_squares(x, dim) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += TILE) {
        const int64_t j = i < half ? i + half : i - half;
        __m512 own = _mm512_loadu_ps(x + i), other = _mm512_loadu_ps(x + j);
        if (norm) {
            own = _mm512_mul_ps(_mm512_mul_ps(own, _mm512_set1_ps(factor)), _mm512_loadu_ps(norm + i));
            other = _mm512_mul_ps(_mm512_mul_ps(other, _mm512_set1_ps(factor)), _mm512_loadu_ps(norm + j));
        }
        const __m512 turned = _mm512_mul_ps(other, _mm512_loadu_ps(sin + i));
        store(i, _mm512_fmadd_ps(own, _mm512_loadu_ps(cos + i), turned));
    }
}

// q, rotated, to `q` [tokens, heads, head_dim]; k, rotated, and v into the pool.
void split_heads(const HrModel &m, const HrStep &s, const Pool &pool, int64_t layer, const float *qkv, bf16 *q) {
    const HrLayer &w = m.layer[layer];
    const int64_t dim = m.head_dim, all = m.heads + 2 * m.kv_heads;
    const bool int8 = m.kv_item_bytes == 1;
    alignas(64) float line[LONGEST_LINE];
    for (int64_t r = 0; r < s.rows; r++) {
        const Row &row = s.row[r];
        for (int64_t i = 0; i < row.tokens; i++) {
            const int64_t token = row.first_token + i;
            const float *x = qkv + token * all * dim, *cos = s.cos + token * dim, *sin = s.sin + token * dim;
            for (int64_t h = 0; h < m.heads; h++)
                rotate(x + h * dim, w.q_norm, m.eps, cos, sin, dim,
                       [to = q + (token * m.heads + h) * dim](int64_t d, __m512 v) { store_bf16(to + d, v); });
            if (!s.write[r]) continue;
            for (int64_t h = 0; h < m.kv_heads; h++) {
                const int64_t at = row.start + i;
                const float *k = x + (m.heads + h) * dim, *v = x + (m.heads + m.kv_heads + h) * dim;
                char *key = pool.line(row.table, at, h, layer, 0), *value = pool.line(row.table, at, h, layer, 1);
                if (int8) {
                    rotate(k, w.k_norm, m.eps, cos, sin, dim, [&](int64_t d, __m512 x) { _mm512_store_ps(line + d, x); });
                    quantise_line(line, dim, key, pool.scale(row.table, at, h, layer, 0));
                    quantise_line(v, dim, value, pool.scale(row.table, at, h, layer, 1));
                    continue;
                }
                rotate(k, w.k_norm, m.eps, cos, sin, dim, [=](int64_t d, __m512 x) { store_bf16((bf16 *)key + d, x); });
                for (int64_t d = 0; d < dim; d += TILE) store_bf16((bf16 *)value + d, _mm512_loadu_ps(v + d));
            }
        }
    }
}

// Last norm and vocabulary product of `count` tokens of a step; `rows` has room for that many.
template <bool AMX>
void head(const HrModel &m, const float *x, bf16 *rows, const int64_t *token, int64_t count, float *logits) {
    Watch watch;
    for (int64_t i = 0; i < count; i++) normalise(x + token[i] * m.hidden, m.norm, m.hidden, m.eps, rows, i);
    if (count) apply<AMX, Then::STORE>(m.head, rows, count, logits, m.threads);
    watch.done(HEAD);
}

template <bool AMX>
int forward(const HrModel &m, const HrStep &s, Buffers &buffers) {
    const int64_t T = s.tokens, E = m.hidden, D = m.head_dim, padded = row_tiles(T) * TILE;
    const int64_t q_size = m.heads * D, n_size = (m.heads + 2 * m.kv_heads) * D;
    float *x = buffers.stream.of<float>(T * E);
    bf16 *rows = buffers.rows.of<bf16>(padded * E);
    const size_t wide_bytes = T * n_size * sizeof(float), inner_bytes = padded * m.intermediate * sizeof(bf16);
    void *wide = buffers.wide.of<char>(wide_bytes > inner_bytes ? wide_bytes : inner_bytes);
    bf16 *q = buffers.queries.of<bf16>(T * q_size), *mixed = buffers.mixed.of<bf16>(padded * q_size);
    if (!x || !rows || !wide || !q || !mixed) return 1;
    const Pool pool = {m.pool, m.kv_heads, m.layers, m.block_size, D, m.kv_item_bytes};
    const auto attend_few = m.kv_item_bytes == 1 ? attend<AMX, true> : attend<AMX, false>;
    const auto attend_head = m.kv_item_bytes == 1 ? attend_many<AMX, true> : attend_many<AMX, false>;
    const Attention attention = {m.heads, m.window, (float)(1.4426950408889634 / std::sqrt((double)D))};

    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < E; i += TILE) _mm512_storeu_ps(x + t * E + i, load_bf16(m.embedding + s.token[t] * E + i));
    Watch watch;
    for (int64_t l = 0; l < m.layers; l++) {
        const HrLayer &w = m.layer[l];
        for (int64_t t = 0; t < T; t++) normalise(x + t * E, w.attention_norm, E, m.eps, rows, t);
        watch.done(NORM);
        apply<AMX, Then::STORE>(w.qkv, rows, T, wide, m.threads);
        watch.done(QKV);
        split_heads(m, s, pool, l, (const float *)wide, q);
        watch.done(HEADS);
#pragma omp parallel for schedule(dynamic) num_threads(m.threads) if (m.threads > 1)
        for (int64_t item = 0; item < s.rows * m.kv_heads; item++) {
            static thread_local Scratch scratch, second;
            const Row &row = s.row[item / m.kv_heads];
            const int64_t pairs = row.tokens * (m.heads / m.kv_heads);
            if (pairs > MANY) {
                attend_head(pool, row, item % m.kv_heads, l, attention, q, mixed, scratch, second);
                continue;
            }
            const int64_t head = item % m.kv_heads, together = heads_together(row, m.heads / m.kv_heads, m.kv_heads);
            if (head % together) continue;
            const int64_t heads = m.kv_heads - head < together ? m.kv_heads - head : together;
            attend_few(pool, row, head, heads, l, attention, q, 0, pairs, mixed, scratch);
        }
        watch.done(ATTENTION);
        apply<AMX, Then::ADD>(w.output, mixed, T, x, m.threads);
        watch.done(OUTPUT);
        for (int64_t t = 0; t < T; t++) normalise(x + t * E, w.mlp_norm, E, m.eps, rows, t);
        watch.done(NORM);
        apply<AMX, Then::SWIGLU>(w.gate_up, rows, T, wide, m.threads);
        watch.done(GATE_UP);
        apply<AMX, Then::ADD>(w.down, (const bf16 *)wide, T, x, m.threads);
        watch.done(DOWN);
    }
    head<AMX>(m, x, rows, s.last, s.wanted, s.logits);
    return 0;
}

Buffers buffers;

}  // namespace

extern "C" {

// Ask the kernel for the AMX registers. Returns 1 when this process may use them.
int hr_use_amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

uint64_t hr_cycles() { return __rdtsc(); }

// Cycles per phase since the start, [8] in the order of `Phase`.
void hr_spent(uint64_t *cycles) { memcpy(cycles, spent, sizeof spent); }

// Read `bytes` (a multiple of 256) once, as fast as one core can; returns something that depends on all of them.
uint64_t hr_read(const char *memory, int64_t bytes) {
    __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t at = 0; at < bytes; at += 256) {
        fetch_ahead(memory + at, 256);
        for (int i = 0; i < 4; i++) sum[i] = _mm512_add_epi64(sum[i], _mm512_loadu_si512(memory + at + 64 * i));
    }
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3])));
}

void hr_pack(const bf16 *weight, int64_t outputs, int64_t inputs, int interleave, bf16 *packed) {
    pack_weight(weight, outputs, inputs, interleave != 0, packed);
}

void hr_pack_quantised(const int8_t *weight, int64_t outputs, int64_t inputs, int interleave, int bits, uint8_t *packed) {
    pack_quantised(weight, outputs, inputs, interleave != 0, bits, packed);
}

// Run a step. Returns 0, or 1 when there is no memory; then nothing has been written. One caller at a time.
int hr_forward(const HrModel *model, const HrStep *step) {
    return model->amx ? forward<true>(*model, *step, buffers) : forward<false>(*model, *step, buffers);
}

// Logits [count, vocab] of tokens of the last step, no more of them than it had.
void hr_logits(const HrModel *model, const int64_t *token, int64_t count, float *logits) {
    const float *x = (const float *)buffers.stream.memory;
    bf16 *rows = (bf16 *)buffers.rows.memory;
    model->amx ? head<true>(*model, x, rows, token, count, logits) : head<false>(*model, x, rows, token, count, logits);
}
}
