/* Rows of bf16 times a packed weight, summed in fp32 over pairs of inputs in their order, rounded once. */
#include "kernels.h"

/* [n, k] of nn.Linear -> [panels, k / 2, PANEL, 2], missing columns zero. `order` says which row of `from` a column of
 * the result is; -1 is a column of zeros. */
void dormouse_pack(const bf16 *from, const int64_t *order, bf16 *to, int64_t k, int64_t columns) {
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < columns / PANEL; panel++)
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = order[panel * PANEL + c];
            uint32_t *target = (uint32_t *)(to + panel * k * PANEL) + c;
            for (int64_t i = 0; i < k / 2; i++) {
                uint32_t both = 0;
                if (row >= 0) memcpy(&both, from + row * k + 2 * i, 4);
                target[i * PANEL] = both;
            }
        }
}

INLINE __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* Rows [0, R) of a register tile. Rounded where transformers' modules round. */
INLINE void tile(const struct matmul *m, int64_t first, int64_t panel, const int R) {
    const bf16 *w = m->weight + panel * m->k * PANEL;
    const bf16 *x = m->x + first * m->stride_x;
    __m512 low[ROWS_MOST], high[ROWS_MOST]; /* of constant size, so that they stay in registers */
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < m->k; i += 2) {
        __m512bh wl = pairs(w + i * PANEL), wh = pairs(w + i * PANEL + PANEL);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            __m512bh xr = pair(x + r * m->stride_x + i);
            low[r] = _mm512_dpbf16_ps(low[r], xr, wl);
            high[r] = _mm512_dpbf16_ps(high[r], xr, wh);
        }
    }
    int64_t left = m->n - panel * PANEL;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        if (m->bias) {
            low[r] = _mm512_add_ps(low[r], load_bf16(m->bias + panel * PANEL));
            high[r] = _mm512_add_ps(high[r], load_bf16(m->bias + panel * PANEL + 16));
        }
        if (m->finish == GATE) { /* a panel holds 16 columns of the gate, then the same ones of what it gates */
            __m512 gate = rounded(silu(rounded(low[r])));
            store_bf16(m->y + (first + r) * m->stride_y + panel * 16, _mm512_mul_ps(gate, rounded(high[r])));
            continue;
        }
        bf16 *y = m->y + (first + r) * m->stride_y + panel * PANEL;
        if (m->finish == ADD) {
            low[r] = _mm512_add_ps(rounded(low[r]), load_bf16(y));
            high[r] = _mm512_add_ps(rounded(high[r]), load_bf16(y + 16));
        }
        if (left >= PANEL) {
            store_bf16(y, low[r]);
            store_bf16(y + 16, high[r]);
        } else {
            bf16 both[PANEL];
            store_bf16(both, low[r]);
            store_bf16(both + 16, high[r]);
            memcpy(y, both, left * sizeof(bf16));
        }
    }
}

#define OF(R) static void tile_##R(const struct matmul *m, int64_t first, int64_t panel) { tile(m, first, panel, R); }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
static void (*const TILES[])(const struct matmul *, int64_t, int64_t) = {
    0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12};

void matmul_shared(const struct matmul *m) {
    int64_t panels = (m->n + PANEL - 1) / PANEL;
    if (m->finish == GATE) panels = m->n / 16;
    int64_t groups = (m->rows + ROWS_MOST - 1) / ROWS_MOST;
#pragma omp for schedule(dynamic)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t first = m->rows * g / groups, end = m->rows * (g + 1) / groups;
            TILES[end - first](m, first, panel);
        }
}
