/* What the three sources share: bf16 in registers, exp, and who works on what.
 *
 * The law: a row's result is a function of that row alone. Every output is summed in one fixed order that depends on
 * neither the number of rows, nor their company, nor the number of threads, so exactness needs no padding and no tiles
 * in matmul. Threads take units of whole outputs, whoever is free first.
 *
 * Needs AVX512-BF16; compiler.py looks for it. Callers hold no lock and may block here.
 */
#ifndef DORMOUSE_KERNELS_H
#define DORMOUSE_KERNELS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define PANEL 32       /* columns of a packed weight that lie together: two vectors of fp32 */
#define ROWS_MOST 12   /* rows of a register tile: 12 x 2 sums, 2 weights and one broadcast fill 27 of 32 registers */
#define TILE 256       /* keys whose softmax is one partial result; tiles begin at multiples of this position */
#define SUBTILE 64     /* keys whose scores are computed together */

INLINE float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

INLINE __m512 load_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void store_bf16(bf16 *to, __m512 value) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(value));
}

/* As if stored as bf16 and read again. */
INLINE __m512 rounded(__m512 value) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
}

INLINE __m512bh pair(const bf16 *from) {
    int32_t bits;
    memcpy(&bits, from, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}

INLINE __m512bh pairs(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

/* e to the x, to about one unit in the last place of fp32; anything below -87 counts as -87. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f); /* Cephes' expf */
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* --- matmul.c: inside a parallel region, all threads call it; returns after a barrier ---------------------------- */

enum finish { PLAIN = 0, ADD = 1, GATE = 2 };

struct matmul {
    const bf16 *x;      /* [rows, k], `stride_x` elements apart */
    const bf16 *weight; /* packed: [panels, k / 2, PANEL, 2] */
    const bf16 *bias;   /* [panels * PANEL] or NULL */
    bf16 *y;            /* [rows, n], `stride_y` apart; ADD adds to what is there; GATE has half as many columns */
    int64_t rows, k, n, stride_x, stride_y;
    int finish;
};

void matmul_shared(const struct matmul *m);

/* --- attention.c: likewise ---------------------------------------------------------------------------------------- */

struct sequence {
    int64_t start, count, position; /* tokens [start, start + count) of the batch; the first one's position */
    const int64_t *slots;           /* block table up to position + count */
};

struct attention {
    const bf16 *query;  /* [tokens, heads, head_dim], `stride_query` elements between tokens */
    bf16 *out;          /* [tokens, heads, head_dim] */
    const bf16 *arena;  /* the layer's K of slot 0; V follows K of all heads */
    const struct sequence *sequences;
    const bf16 *sinks;  /* [heads] or NULL */
    float *partial;     /* see partial_floats */
    char *scratch;      /* per thread, see scratch_bytes */
    int64_t num_sequences, stride_query, slot_elements, block_tokens, heads, kv_heads, head_dim, window, scratch_bytes;
    float scaling, softcap; /* window, softcap: 0 is none */
};

void attention_shared(const struct attention *a);

#endif
