/* Attention of packed sequences over their blocks in the arena.
 *
 * Keys are taken in tiles of TILE, counted from position 0. Of one row (a token's query head) and one tile: scores, their
 * maximum m, exp(score - m), its sum l, and P @ V in pairs of keys in order. Tiles are put together in order. A row of a
 * single token and one of a prompt go through the same sums, so their bits agree whatever the chunks were.
 *
 *     few rows (decoding)    unit of work: sequence x KV head x tile; put together afterwards
 *     many rows (a prompt)   unit of work: 48 rows x KV head, over all its tiles
 *
 * Per tile K is transposed to pairs of dimensions [dim / 2][16 keys][2] and V to pairs of keys [key / 2][dim][2], which is
 * what the dot-product instruction takes; on few rows that hides behind the reading of memory.
 */
#include <math.h>
#include <omp.h>

#include "kernels.h"

#define ROWS 6            /* rows of a register tile: 6 x 4 vectors of sums */
#define UNIT_ROWS 48
#define FEW_ROWS 12       /* up to here tiles are units of their own */

/* Rows are numbered token-major within a KV head's group: row = token * group + head in group. */
struct unit {
    const struct attention *a;
    const struct sequence *s;
    int64_t kv_head, first_row, rows, group;
};

struct scratch {
    bf16 *keys, *values; /* one tile, transposed */
    float *scores;       /* [ROWS, TILE] */
    bf16 *weights;       /* [ROWS, TILE], exp(score - m) */
    float *sums;         /* [UNIT_ROWS, head_dim + 2]: sum of P @ V, then m and l */
    bf16 *query;         /* [UNIT_ROWS, head_dim] */
};

int64_t dormouse_scratch_bytes(int64_t head_dim) {
    return 2 * TILE * head_dim * 2 + ROWS * TILE * 6 + UNIT_ROWS * (head_dim + 16) * 4 + UNIT_ROWS * head_dim * 2 + 4096;
}

static struct scratch cut(const struct attention *a) {
    char *base = a->scratch + a->scratch_bytes * omp_get_thread_num();
    struct scratch w;
    w.keys = (bf16 *)base;
    w.values = w.keys + TILE * a->head_dim;
    w.scores = (float *)(w.values + TILE * a->head_dim);
    w.weights = (bf16 *)(w.scores + ROWS * TILE);
    w.sums = (float *)(w.weights + ROWS * TILE);
    w.query = (bf16 *)(w.sums + UNIT_ROWS * (a->head_dim + 16));
    return w;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* 16 rows of 16 dwords -> 16 columns. */
INLINE void transpose(const bf16 *from, int64_t stride, bf16 *to) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + 32 * i, _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88));
        _mm512_storeu_si512(to + 32 * (4 + i), _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88));
        _mm512_storeu_si512(to + 32 * (8 + i), _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd));
        _mm512_storeu_si512(to + 32 * (12 + i), _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd));
    }
}

#define AHEAD 64          /* tokens */

/* K of the head's block that holds `position`, from there on; V follows K of all heads. */
INLINE const bf16 *keys_at(const struct unit *u, int64_t position) {
    const struct attention *a = u->a;
    int64_t block = a->block_tokens, row = block * a->head_dim;
    return a->arena + u->s->slots[position / block] * a->slot_elements + u->kv_head * row + position % block * a->head_dim;
}

/* Blocks lie far apart, so that the hardware does not see what comes next. */
INLINE void ask_for(const struct unit *u, int64_t position) {
    if (position >= u->s->position + u->s->count) return;
    const bf16 *k = keys_at(u, position), *v = k + u->a->kv_heads * u->a->block_tokens * u->a->head_dim;
    for (int64_t i = 0; i < 16 * u->a->head_dim; i += 32) {
        _mm_prefetch((const char *)(k + i), _MM_HINT_T1);
        _mm_prefetch((const char *)(v + i), _MM_HINT_T1);
    }
}

/* Keys and values [start, start + count) of the unit's head, transposed; zeros up to a multiple of SUBTILE. */
static void gather(const struct unit *u, const struct scratch *w, int64_t start, int64_t count) {
    const struct attention *a = u->a;
    int64_t dim = a->head_dim;
    int64_t padded = (count + SUBTILE - 1) / SUBTILE * SUBTILE;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t key = 0; key < padded; key += 16) {
        bf16 *keys = w->keys + key * dim, *values = w->values + key * dim;
        if (key >= count) {
            memset(keys, 0, 32 * dim);
            memset(values, 0, 32 * dim);
            continue;
        }
        ask_for(u, start + key + AHEAD);
        const bf16 *k = keys_at(u, start + key), *v = k + a->kv_heads * a->block_tokens * dim;
        for (int64_t d = 0; d < dim; d += 32) transpose(k + d, dim, keys + d * 16);
        for (int64_t i = 0; i < 16; i += 2)
            for (int64_t d = 0; d < dim; d += 32) {
                __m512i even = _mm512_loadu_si512(v + i * dim + d), odd = _mm512_loadu_si512(v + (i + 1) * dim + d);
                _mm512_storeu_si512(values + i * dim + 2 * d, _mm512_permutex2var_epi16(even, low, odd));
                _mm512_storeu_si512(values + i * dim + 2 * d + 32, _mm512_permutex2var_epi16(even, high, odd));
            }
    }
}

/* scores[r][64 keys] = query[r] . key */
INLINE void score(const bf16 *query, const bf16 *keys, float *scores, int64_t dim, const int R) {
    __m512 sum[ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sum[r][c] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 2) {
        __m512bh k[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) k[c] = pairs(keys + c * 16 * dim + d * 16);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m512bh q = pair(query + r * dim + d);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], q, k[c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) _mm512_storeu_ps(scores + r * TILE + 16 * c, sum[r][c]);
}

/* out[r][64 or 32 dims] = sum over keys of weights[r][key] * values[key] */
INLINE void mix(const bf16 *weights, const bf16 *values, float *out, int64_t stride, int64_t dim, int64_t keys,
                const int R, const int C) {
    __m512 sum[ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c] = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key += 2) {
        __m512bh v[4];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) v[c] = pairs(values + key * dim + 32 * c);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m512bh p = pair(weights + r * TILE + key);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], p, v[c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) _mm512_storeu_ps(out + r * stride + 16 * c, sum[r][c]);
}

#define OF(R)                                                                                                         \
    static void score_##R(const bf16 *q, const bf16 *k, float *s, int64_t dim) { score(q, k, s, dim, R); }           \
    static void mix_##R(const bf16 *p, const bf16 *v, float *o, int64_t stride, int64_t dim, int64_t keys) {         \
        int64_t d = 0;                                                                                                \
        for (; d + 64 <= dim; d += 64) mix(p, v + 2 * d, o + d, stride, dim, keys, R, 4);                             \
        if (d < dim) mix(p, v + 2 * d, o + d, stride, dim, keys, R, 2);                                               \
    }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6)
static void (*const SCORES[])(const bf16 *, const bf16 *, float *, int64_t) = {0,       score_1, score_2, score_3,
                                                                                score_4, score_5, score_6};
static void (*const MIXES[])(const bf16 *, const bf16 *, float *, int64_t, int64_t, int64_t) = {
    0, mix_1, mix_2, mix_3, mix_4, mix_5, mix_6};

INLINE __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

/* Scores of keys [from, to) of a tile -> weights and their sum; the others weigh nothing. Returns m, -inf for none. */
static float softmax(const struct attention *a, float *scores, bf16 *weights, int64_t from, int64_t to, int64_t keys,
                     float *sum) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY), scaling = _mm512_set1_ps(a->scaling);
    __m512 greatest = nothing, total = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key += 16) {
        __mmask16 seen = first_lanes(to - key) & ~first_lanes(from - key);
        __m512 s = _mm512_mul_ps(_mm512_loadu_ps(scores + key), scaling);
        if (a->softcap > 0) { /* tanh(x) = 1 - 2 / (exp(2x) + 1) */
            __m512 cap = _mm512_set1_ps(a->softcap), one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
            __m512 e = exponential(_mm512_mul_ps(two, _mm512_div_ps(s, cap)));
            s = _mm512_mul_ps(cap, _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one))));
        }
        s = _mm512_mask_mov_ps(nothing, seen, s);
        _mm512_storeu_ps(scores + key, s);
        greatest = _mm512_max_ps(greatest, s);
    }
    float m = _mm512_reduce_max_ps(greatest);
    for (int64_t key = 0; key < keys; key += 16) {
        __m512 s = _mm512_loadu_ps(scores + key);
        __mmask16 seen = _mm512_cmp_ps_mask(s, nothing, _CMP_NEQ_OQ);
        __m512 p = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(s, _mm512_set1_ps(m))));
        store_bf16(weights + key, p);
        total = _mm512_add_ps(total, p);
    }
    *sum = _mm512_reduce_add_ps(total);
    return m;
}

/* One tile for all of the unit's rows -> sums [rows, head_dim + 2]. Keys of the tile: [start, start + keys). */
static void partial(const struct unit *u, const struct scratch *w, int64_t start, int64_t count, float *sums) {
    const struct attention *a = u->a;
    int64_t dim = a->head_dim, keys = (count + SUBTILE - 1) / SUBTILE * SUBTILE;
    gather(u, w, start, count);
    for (int64_t first = 0; first < u->rows; first += ROWS) {
        int64_t rows = least(ROWS, u->rows - first);
        for (int64_t key = 0; key < keys; key += SUBTILE)
            SCORES[rows](w->query + first * dim, w->keys + key * dim, w->scores + key, dim);
        for (int64_t r = 0; r < rows; r++) {
            int64_t position = u->s->position + (u->first_row + first + r) / u->group;
            int64_t from = a->window > 0 ? most(0, position - a->window + 1 - start) : 0;
            float *row = sums + (first + r) * (dim + 2);
            row[dim] = softmax(a, w->scores + r * TILE, w->weights + r * TILE, from, position + 1 - start, keys,
                               &row[dim + 1]);
        }
        MIXES[rows](w->weights, w->values, sums + first * (dim + 2), dim + 2, dim, keys);
    }
}

/* Put the next tile's sums `part` to `total`, one row each: [head_dim + 2]. */
static void put(float *total, const float *part, int64_t dim) {
    float m = part[dim];
    if (m == -INFINITY) return; /* no key of that tile is seen */
    float both = total[dim] > m ? total[dim] : m;
    float scales[16];
    __m512 e = exponential(_mm512_mask_mov_ps(_mm512_set1_ps(m - both), 1, _mm512_set1_ps(total[dim] - both)));
    _mm512_storeu_ps(scales, e);
    float old = total[dim] == -INFINITY ? 0 : scales[0], new = scales[1];
    for (int64_t d = 0; d < dim; d += 16) {
        __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(total + d), _mm512_set1_ps(old));
        _mm512_storeu_ps(total + d, _mm512_fmadd_ps(_mm512_loadu_ps(part + d), _mm512_set1_ps(new), kept));
    }
    total[dim + 1] = total[dim + 1] * old + part[dim + 1] * new;
    total[dim] = both;
}

static void finish(const struct unit *u, int64_t row, float *total) {
    const struct attention *a = u->a;
    int64_t dim = a->head_dim, head = u->kv_head * u->group + (u->first_row + row) % u->group;
    int64_t token = u->s->start + (u->first_row + row) / u->group;
    float scale = 1, sum = total[dim + 1];
    if (a->sinks) { /* one more key, whose value is zero */
        float sink = to_float(a->sinks[head]), both = sink > total[dim] ? sink : total[dim];
        scale = expf(total[dim] - both);
        sum = sum * scale + expf(sink - both);
    }
    __m512 factor = _mm512_set1_ps(scale / sum);
    for (int64_t d = 0; d < dim; d += 16)
        store_bf16(a->out + (token * a->heads + head) * dim + d, _mm512_mul_ps(_mm512_loadu_ps(total + d), factor));
}

static void fetch_query(const struct unit *u, bf16 *to) {
    const struct attention *a = u->a;
    for (int64_t row = 0; row < u->rows; row++) {
        int64_t token = u->s->start + (u->first_row + row) / u->group;
        int64_t head = u->kv_head * u->group + (u->first_row + row) % u->group;
        memcpy(to + row * a->head_dim, a->query + token * a->stride_query + head * a->head_dim, 2 * a->head_dim);
    }
}

static void start(float *total, int64_t dim) {
    memset(total, 0, (dim + 2) * sizeof(float));
    total[dim] = -INFINITY;
}

/* Tiles [first, end) that any row of the unit sees. */
static int64_t first_tile(const struct unit *u) {
    int64_t position = u->s->position + u->first_row / u->group;
    return u->a->window > 0 ? most(0, position - u->a->window + 1) / TILE : 0;
}

static int64_t seen_keys(const struct unit *u) {
    return u->s->position + (u->first_row + u->rows - 1) / u->group + 1;
}

static int is_few(const struct attention *a, const struct sequence *s) {
    return s->count * (a->heads / a->kv_heads) <= FEW_ROWS;
}

static int64_t num_tiles(const struct sequence *s) { return (s->position + s->count + TILE - 1) / TILE; }

int64_t dormouse_partial_floats(const struct attention *a) {
    int64_t total = 0;
    for (int64_t i = 0; i < a->num_sequences; i++)
        if (is_few(a, &a->sequences[i])) total += num_tiles(&a->sequences[i]);
    return total * a->kv_heads * FEW_ROWS * (a->head_dim + 2);
}

static void many_rows(const struct attention *a, const struct sequence *s, int64_t number) {
    struct scratch w = cut(a);
    int64_t group = a->heads / a->kv_heads, dim = a->head_dim, step = UNIT_ROWS / group * group;
    if (step == 0) step = UNIT_ROWS;
    struct unit u = {a, s, number % a->kv_heads, number / a->kv_heads * step, 0, group};
    u.rows = least(step, s->count * group - u.first_row);
    float *total = w.sums, part[UNIT_ROWS * (dim + 2)];
    fetch_query(&u, w.query);
    for (int64_t row = 0; row < u.rows; row++) start(total + row * (dim + 2), dim);
    int64_t seen = seen_keys(&u);
    for (int64_t tile = first_tile(&u); tile * TILE < seen; tile++) {
        partial(&u, &w, tile * TILE, least(TILE, seen - tile * TILE), part);
        for (int64_t row = 0; row < u.rows; row++) put(total + row * (dim + 2), part + row * (dim + 2), dim);
    }
    for (int64_t row = 0; row < u.rows; row++) finish(&u, row, total + row * (dim + 2));
}

void attention_shared(const struct attention *a) {
    int64_t group = a->heads / a->kv_heads, dim = a->head_dim, row_floats = dim + 2, unit_floats = FEW_ROWS * row_floats;
    int64_t few = 0;
    for (int64_t i = 0; i < a->num_sequences; i++)
        if (is_few(a, &a->sequences[i])) few += num_tiles(&a->sequences[i]);
    int64_t before = 0;
    for (int64_t i = 0; i < a->num_sequences; i++) {
        const struct sequence *s = &a->sequences[i];
        if (!is_few(a, s)) { /* the last rows see the most: the longest first */
            int64_t step = UNIT_ROWS / group * group;
            if (step == 0) step = UNIT_ROWS;
            int64_t units = (s->count * group + step - 1) / step * a->kv_heads;
#pragma omp for schedule(dynamic) nowait
            for (int64_t number = 0; number < units; number++) many_rows(a, s, units - 1 - number);
            continue;
        }
        int64_t tiles = num_tiles(s);
#pragma omp for schedule(dynamic) nowait
        for (int64_t number = 0; number < tiles * a->kv_heads; number++) {
            struct scratch w = cut(a);
            struct unit u = {a, s, number / tiles, 0, s->count * group, group};
            int64_t tile = number % tiles, seen = seen_keys(&u);
            if (tile < first_tile(&u)) continue;
            fetch_query(&u, w.query);
            partial(&u, &w, tile * TILE, least(TILE, seen - tile * TILE),
                    a->partial + ((before + tile) * a->kv_heads + u.kv_head) * unit_floats);
        }
        before += tiles;
    }
    if (!few) {
#pragma omp barrier
        return;
    }
#pragma omp barrier
    before = 0;
    for (int64_t i = 0; i < a->num_sequences; i++) {
        const struct sequence *s = &a->sequences[i];
        if (!is_few(a, s)) continue;
        int64_t tiles = num_tiles(s), rows = s->count * group;
#pragma omp for schedule(static) nowait
        for (int64_t number = 0; number < a->kv_heads * rows; number++) {
            struct unit u = {a, s, number / rows, 0, rows, group};
            float total[row_floats];
            start(total, dim);
            for (int64_t tile = first_tile(&u); tile < tiles; tile++)
                put(total, a->partial + ((before + tile) * a->kv_heads + u.kv_head) * unit_floats + number % rows * row_floats,
                    dim);
            finish(&u, number % rows, total);
        }
        before += tiles;
    }
#pragma omp barrier
}
