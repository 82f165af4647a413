/* A whole step of a decoder of Llama's kind in one parallel region: embedding, layers, norm and head.
 *
 * Numbers are rounded to bf16 where transformers' modules round them. Of the last layer only the rows whose logits are
 * wanted are gone on with once K and V are stored.
 */
#include <math.h>
#include <omp.h>

#include "kernels.h"

struct layer {
    const bf16 *input_norm, *post_norm, *query_norm, *key_norm; /* the last two [head_dim] or NULL */
    const bf16 *qkv, *qkv_bias, *o, *o_bias, *gate_up, *down;   /* packed; see matmul.c */
    int64_t arena_offset, window;                               /* elements to the layer's K in a slot; 0 is no window */
};

struct model {
    const struct layer *layers;
    const bf16 *embedding, *norm, *head;
    int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, vocabulary;
    float epsilon, scaling;
};

struct step {
    const int64_t *token_ids, *positions; /* [tokens] */
    const int64_t *write;             /* [tokens] element of the arena where a token's K of a layer at offset 0 begins */
    const bf16 *cos, *sin;            /* [positions, head_dim] */
    const struct sequence *sequences;
    const int64_t *wanted;            /* [num_wanted] rows of the batch */
    bf16 *arena, *logits;             /* logits [num_wanted, vocabulary] */
    bf16 *hidden, *normed, *qkv, *attended, *inner; /* workspaces of `tokens` rows */
    float *partial;
    char *scratch;
    int64_t tokens, num_sequences, num_wanted, slot_elements, block_tokens, scratch_bytes, threads;
};

/* y = x / rms(x) * weight, one row; n a multiple of 16. */
static void rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, int64_t n, float epsilon) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = load_bf16(x + i);
        total = _mm512_fmadd_ps(v, v, total);
    }
    __m512 factor = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(total) / (float)n + epsilon));
    for (int64_t i = 0; i < n; i += 16)
        store_bf16(y + i, _mm512_mul_ps(load_bf16(weight + i), rounded(_mm512_mul_ps(load_bf16(x + i), factor))));
}

static void norm_rows(const bf16 *x, const bf16 *weight, bf16 *y, int64_t rows, int64_t n, float epsilon) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) rms_norm(x + row * n, weight, y + row * n, n, epsilon);
}

/* x * cos + rotate_half(x) * sin, in place; n a multiple of 32. */
static void rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t n) {
    int64_t half = n / 2;
    for (int64_t i = 0; i < half; i += 16) {
        __m512 low = load_bf16(x + i), high = load_bf16(x + half + i), minus = _mm512_sub_ps(_mm512_setzero_ps(), high);
        __m512 first = _mm512_add_ps(rounded(_mm512_mul_ps(low, load_bf16(cos + i))),
                                     rounded(_mm512_mul_ps(minus, load_bf16(sin + i))));
        __m512 second = _mm512_add_ps(rounded(_mm512_mul_ps(high, load_bf16(cos + half + i))),
                                      rounded(_mm512_mul_ps(low, load_bf16(sin + half + i))));
        store_bf16(x + i, first);
        store_bf16(x + half + i, second);
    }
}

/* Norm and rotate one token's heads; K and V go to the arena. */
static void place(const struct model *m, const struct layer *l, const struct step *s, int64_t token) {
    int64_t dim = m->head_dim, width = (m->heads + 2 * m->kv_heads) * dim, head_size = s->block_tokens * dim;
    const bf16 *cos = s->cos + s->positions[token] * dim, *sin = s->sin + s->positions[token] * dim;
    bf16 *row = s->qkv + token * width;
    for (int64_t head = 0; head < m->heads + m->kv_heads; head++) {
        const bf16 *norm = head < m->heads ? l->query_norm : l->key_norm;
        if (norm) rms_norm(row + head * dim, norm, row + head * dim, dim, m->epsilon);
        rotate(row + head * dim, cos, sin, dim);
    }
    bf16 *slot = s->arena + l->arena_offset + s->write[token];
    for (int64_t head = 0; head < 2 * m->kv_heads; head++)
        memcpy(slot + head * head_size, row + (m->heads + head) * dim, dim * sizeof(bf16));
}

static void select_rows(const struct step *s, bf16 *from, int64_t width) {
    /* Wanted rows ascend, so a row is read before it is overwritten. */
    for (int64_t i = 0; i < s->num_wanted; i++)
        if (s->wanted[i] != i) memcpy(from + i * width, from + s->wanted[i] * width, width * sizeof(bf16));
}

static void run_layer(const struct model *m, const struct step *s, int64_t number) {
    const struct layer *l = &m->layers[number];
    int64_t hidden = m->hidden, wide = m->heads * m->head_dim, width = wide + 2 * m->kv_heads * m->head_dim;
    int64_t rows = s->tokens;
    norm_rows(s->hidden, l->input_norm, s->normed, rows, hidden, m->epsilon);
    struct matmul qkv = {s->normed, l->qkv, l->qkv_bias, s->qkv, rows, hidden, width, hidden, width, PLAIN};
    matmul_shared(&qkv);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < rows; token++) place(m, l, s, token);
    if (number == m->num_layers - 1 && s->num_wanted == 0) return;
    struct attention attention = {s->qkv, s->attended, s->arena + l->arena_offset, s->sequences, 0, s->partial, s->scratch,
                                  s->num_sequences, width, s->slot_elements, s->block_tokens, m->heads, m->kv_heads,
                                  m->head_dim, l->window, s->scratch_bytes, m->scaling, 0};
    attention_shared(&attention);
    if (number == m->num_layers - 1) {
        rows = s->num_wanted;
#pragma omp single
        {
            select_rows(s, s->attended, wide);
            select_rows(s, s->hidden, hidden);
        }
    }
    struct matmul o = {s->attended, l->o, l->o_bias, s->hidden, rows, wide, hidden, wide, hidden, ADD};
    matmul_shared(&o);
    norm_rows(s->hidden, l->post_norm, s->normed, rows, hidden, m->epsilon);
    struct matmul gate = {s->normed, l->gate_up, 0, s->inner, rows, hidden, m->inner, hidden, m->inner, GATE};
    matmul_shared(&gate);
    struct matmul down = {s->inner, l->down, 0, s->hidden, rows, m->inner, hidden, m->inner, hidden, ADD};
    matmul_shared(&down);
}

/* Blocking; the caller's other threads go on. Logits of the wanted rows, which ascend and are distinct. */
void dormouse_step(const struct model *m, const struct step *s) {
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s->tokens; row++)
            memcpy(s->hidden + row * m->hidden, m->embedding + s->token_ids[row] * m->hidden, m->hidden * sizeof(bf16));
        for (int64_t number = 0; number < m->num_layers; number++) run_layer(m, s, number);
        if (s->num_wanted) {
            norm_rows(s->hidden, m->norm, s->normed, s->num_wanted, m->hidden, m->epsilon);
            struct matmul head = {s->normed, m->head, 0, s->logits, s->num_wanted, m->hidden, m->vocabulary, m->hidden,
                                  m->vocabulary, PLAIN};
            matmul_shared(&head);
        }
    }
}

/* For tests and for measuring: one matmul, one attention. */
void dormouse_matmul(const struct matmul *m, int64_t threads) {
#pragma omp parallel num_threads(threads)
    matmul_shared(m);
}

void dormouse_attention(const struct attention *a, int64_t threads) {
#pragma omp parallel num_threads(threads)
    attention_shared(a);
}
