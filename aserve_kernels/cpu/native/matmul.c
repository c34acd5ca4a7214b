/* x w^T + bias for bfloat16, with w packed once: AMX tiles where the machine has them, else AVX512's dot products.
 *
 * A panel is 32 rows of w (output features); within it, for each 32 columns, two tiles of 16 rows, each of them 16
 * pairs of columns by 16 rows: what one tile register or sixteen vectors hold. A panel lies in one piece, so a step
 * with few tokens reads w once, in order, at the speed of memory. Each token's sum is in one fixed order, whatever the
 * number of tokens: its result has no part of its batch. */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#include "grid.c"

#define PANEL 32
#define AHEAD 8192 /* bytes to fetch ahead; the next panel is mostly this thread's as well */

struct matmul {
    const uint16_t *x, *w, *bias; /* w: panels, the first of them number w_panel */
    const struct grid_half *grid;
    uint16_t *out;
    long w_panel, tokens, x_stride, columns, rows, out_stride, panels, panels_each, tokens_each;
};

/* Writes 32 sums of one token, rounded, with the bias. */
INLINE void finish(const struct matmul *m, long token, long panel, __m512 low, __m512 high) {
    long first = panel * PANEL, left = min_of(PANEL, m->rows - first);
    if (left == PANEL && !m->bias) { /* nearly always */
        _mm512_storeu_si512(m->out + token * m->out_stride + first, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        return;
    }
    __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    if (m->bias) {
        __m512i bias = _mm512_maskz_loadu_epi16(mask, m->bias + first);
        low = _mm512_add_ps(
            low, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(bias)), 16)));
        high = _mm512_add_ps(
            high, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bias, 1)), 16)));
    }
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_mask_storeu_epi16(m->out + token * m->out_stride + first, mask, both);
}

#if defined(__AMX_BF16__) && !defined(ASERVE_WITHOUT_AMX)
#define MATMUL "AMX"
#include <sys/syscall.h>
#include <unistd.h>

/* Tiles 0 to 3 are sums (token half * 2 + row half), 4 and 5 tokens, 6 and 7 rows of w. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};

static void configure(long tokens) {
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        int second = tile == 2 || tile == 3 || tile == 5; /* half of the tokens; of one row if there is none */
        config.column_bytes[tile] = 64;
        config.rows[tile] = tile >= 6 ? 16 : (uint8_t)(second ? max_of(1, tokens - 16) : min_of(16, tokens));
    }
    _tile_loadconfig(&config);
}

INLINE void fetch(const uint16_t *w) {
    for (int line = 0; line < 2048; line += 64)
        _mm_prefetch((const char *)w + line + AHEAD, _MM_HINT_T0);
}

/* Up to 32 tokens by one panel. */
INLINE void multiply_block(const struct matmul *m, long token, long count, long panel, int both_halves) {
    const uint16_t *x = m->x + token * m->x_stride, *w = m->w + (panel - m->w_panel) * PANEL * m->columns;
    size_t stride = (size_t)m->x_stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (both_halves) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long column = 0; column < m->columns; column += 32, w += 1024) {
        if (!both_halves)
            fetch(w);
        _tile_loadd(4, x + column, stride);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both_halves) {
            _tile_loadd(5, x + 16 * m->x_stride + column, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float sums[4][16][16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (both_halves) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    for (long i = 0; i < count; i++)
        finish(m, token + i, panel, _mm512_load_ps(sums[i / 16 * 2][i % 16]),
               _mm512_load_ps(sums[i / 16 * 2 + 1][i % 16]));
}

static void multiply_panels(const struct matmul *m, long first, long last, long start, long end) {
    long whole = start + (end - start) / 32 * 32;
    if (whole > start) {
        configure(32);
        for (long panel = first; panel < last; panel++)
            for (long token = start; token < whole; token += 32)
                multiply_block(m, token, 32, panel, 1);
    }
    if (whole < end) {
        configure(end - whole);
        for (long panel = first; panel < last; panel++)
            if (end - whole > 16)
                multiply_block(m, whole, end - whole, panel, 1);
            else
                multiply_block(m, whole, end - whole, panel, 0);
    }
    _tile_release();
}

/* The kernel lets a process use the tiles when it has asked. */
static int may_multiply(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

#else
#define MATMUL "AVX512-BF16"

/* Up to 8 tokens by one panel. */
INLINE void multiply_block(const struct matmul *m, long token, int count, long panel) {
    const uint16_t *x = m->x + token * m->x_stride, *w = m->w + (panel - m->w_panel) * PANEL * m->columns;
    __m512 low[8], high[8];
    for (int i = 0; i < count; i++)
        low[i] = high[i] = _mm512_setzero_ps();
    for (long column = 0; column < m->columns; column += 32, w += 1024)
        for (int pair = 0; pair < 16; pair++) {
            __m512bh first = (__m512bh)_mm512_loadu_si512(w + pair * 32);
            __m512bh second = (__m512bh)_mm512_loadu_si512(w + 512 + pair * 32);
            if (pair % 2 == 0) {
                _mm_prefetch((const char *)(w + pair * 32) + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)(w + pair * 32) + AHEAD + 64, _MM_HINT_T0);
                _mm_prefetch((const char *)(w + 512 + pair * 32) + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)(w + 512 + pair * 32) + AHEAD + 64, _MM_HINT_T0);
            }
            for (int i = 0; i < count; i++) {
                int32_t two;
                memcpy(&two, x + i * m->x_stride + column + pair * 2, 4);
                __m512bh values = (__m512bh)_mm512_set1_epi32(two);
                low[i] = _mm512_dpbf16_ps(low[i], values, first);
                high[i] = _mm512_dpbf16_ps(high[i], values, second);
            }
        }
    for (int i = 0; i < count; i++)
        finish(m, token + i, panel, low[i], high[i]);
}

static void multiply_panels(const struct matmul *m, long first, long last, long start, long end) {
    for (long panel = first; panel < last; panel++) {
        long token = start;
        for (; token + 8 <= end; token += 8)
            multiply_block(m, token, 8, panel);
        switch (end - token) {
        case 7: multiply_block(m, token, 7, panel); break;
        case 6: multiply_block(m, token, 6, panel); break;
        case 5: multiply_block(m, token, 5, panel); break;
        case 4: multiply_block(m, token, 4, panel); break;
        case 3: multiply_block(m, token, 3, panel); break;
        case 2: multiply_block(m, token, 2, panel); break;
        case 1: multiply_block(m, token, 1, panel); break;
        }
    }
}

static int may_multiply(void) { return 1; }
#endif

static void matmul_task(void *argument, long i) {
    struct matmul m = *(const struct matmul *)argument;
    long groups = (m.panels + m.panels_each - 1) / m.panels_each;
    long first = i % groups * m.panels_each, last = min_of(m.panels, first + m.panels_each);
    long start = i / groups * m.tokens_each, end = min_of(m.tokens, start + m.tokens_each);
    if (!m.grid) {
        multiply_panels(&m, first, last, start, end);
        return;
    }
    uint16_t tiles[PANEL * m.columns] __attribute__((aligned(64)));
    m.w = tiles;
    for (m.w_panel = first; m.w_panel < last; m.w_panel++) {
        expand_panel(m.grid + m.w_panel * (m.columns / 16), tiles, m.columns);
        multiply_panels(&m, m.w_panel, m.w_panel + 1, start, end);
    }
}

#define TASK_BYTES 98304  /* of w, where tokens are few: 5 us of reading */
#define MOST_TOKENS 512   /* that stay in the cache of a core beside a panel */

/* out[tokens][rows] = x[tokens][columns] w^T + bias; columns are a multiple of 32, the last dimensions contiguous. */
EXPORT void aserve_matmul(
    const uint16_t *x, const void *packed, const uint16_t *bias, uint16_t *out, long tokens, long columns,
    long rows, long x_stride, long out_stride, int on_grid, int threads) {
    struct matmul m = {x, on_grid ? NULL : packed, bias, on_grid ? packed : NULL, out, 0, tokens, x_stride, columns,
                       rows, out_stride, (rows + PANEL - 1) / PANEL, 1, MOST_TOKENS};
    if (tokens <= 64)
        m.panels_each = max_of(1, TASK_BYTES / (PANEL * 2 * columns));
    long wanted = 4 * (threads < 0 ? -threads : threads); /* tasks, so that nobody waits for long at the end */
    if (m.panels < wanted && tokens >= 128)
        m.tokens_each = max_of(64, min_of(MOST_TOKENS, round_up(tokens * m.panels / wanted, 32)));
    long groups = (m.panels + m.panels_each - 1) / m.panels_each;
    parallel_for(matmul_task, &m, groups * ((tokens + m.tokens_each - 1) / m.tokens_each), threads);
}

EXPORT long aserve_packed_size(long rows, long columns) { return round_up(rows, PANEL) * columns; }

/* packed has the size above; w[rows][columns] is contiguous. */
EXPORT void aserve_pack(const uint16_t *w, uint16_t *packed, long rows, long columns) {
    for (long panel = 0; panel * PANEL < rows; panel++)
        for (long column = 0; column < columns; column += 32)
            for (long half = 0; half < 2; half++)
                for (long pair = 0; pair < 16; pair++)
                    for (long i = 0; i < 16; i++) {
                        long row = panel * PANEL + half * 16 + i;
                        uint32_t two = 0;
                        if (row < rows)
                            memcpy(&two, w + row * columns + column + pair * 2, 4);
                        memcpy(packed, &two, 4);
                        packed += 2;
                    }
}
#endif

/* Name of the instructions that multiply bfloat16 matrices here, "" if there are none. */
EXPORT const char *aserve_matmul_name(void) {
#ifdef MATMUL
    return may_multiply() ? MATMUL : "";
#else
    return "";
#endif
}
