/* Weights that lie on grids of 16 values, kept in 5 bits instead of 16, without loss.
 *
 * A checkpoint that was once quantised (GGUF's Q4_0 and Q4_1) and then written as bfloat16 still has, in each 32
 * columns of a row, only the values round(step * q + offset), q from 0 to 15, with step and offset in float16. A step
 * with few tokens waits for the weights to arrive from memory, so they are read in that form and turned back into the
 * very bfloat16 numbers beside the cores. Whether a matrix is of that kind is found by trying, block by block; a matrix
 * in which a single number would change is refused.
 *
 * A panel is 32 rows, as in matmul.c; for each 32 columns it has two halves of 16 rows: 16 steps, 16 offsets, and 16
 * lines of 16 bytes. Line p holds q of the columns 2 p and 2 p + 1: byte i has lane i of a vector of rows 0 to 7 in its
 * lower bits and lane i of one of rows 8 to 15 in its upper bits, two lanes to a row. */

#define GRID_HALF_BYTES 320

struct grid_half {
    uint16_t steps[16], offsets[16];
    uint8_t lines[16][16];
};

/* Writes one panel as matmul.c's bfloat16 tiles: 32 columns are 1024 numbers. */
static void expand_panel(const struct grid_half *half, uint16_t *tiles, long columns) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i second = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    for (const struct grid_half *end = half + columns / 16; half < end; half++, tiles += 512) {
        for (int line = 0; line < GRID_HALF_BYTES; line += 64)
            _mm_prefetch((const char *)half + line + 4096, _MM_HINT_T0);
        __m512 steps = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)half->steps));
        __m512 offsets = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)half->offsets));
        __m512 low_steps = _mm512_permutexvar_ps(first, steps), high_steps = _mm512_permutexvar_ps(second, steps);
        __m512 low_offsets = _mm512_permutexvar_ps(first, offsets);
        __m512 high_offsets = _mm512_permutexvar_ps(second, offsets);
        for (int p = 0; p < 16; p++) {
            __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)half->lines[p]));
            __m512 low = _mm512_permutexvar_ps(bytes, numbers); /* looks at four bits of each lane */
            __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
            low = _mm512_fmadd_ps(low, low_steps, low_offsets);
            high = _mm512_fmadd_ps(high, high_steps, high_offsets);
            _mm512_storeu_si512(tiles + 32 * p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* Whether round(step * q + offset) is every value. */
static int reproduces(const float *values, const float *q, float step, float offset) {
    int wrong = 0;
#pragma omp simd reduction(| : wrong)
    for (int i = 0; i < 32; i++)
        wrong |= rounded(step * q[i] + offset, BF16) != values[i]; /* the product is exact, so fused or not */
    return !wrong;
}

/* A block on its way to a grid: values, the numbers between which each was before it was rounded, and q. */
struct grid_block {
    float values[32], below[32], above[32], q[32], inverse[32], low, high;
};

/* Fills in all but the values; 0 if they are not evenly spaced between the lowest and the highest. */
static int space_out(struct grid_block *b) {
    float low = b->values[0], high = b->values[0], distance = 0;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int i = 0; i < 32; i++) {
        low = b->values[i] < low ? b->values[i] : low;
        high = b->values[i] > high ? b->values[i] : high;
    }
    b->low = low, b->high = high;
    if (!(high - low < 60000.0f) || !(fabsf(low) < 60000.0f)) /* beyond float16, or not a number */
        return 0;
    float per_step = high > low ? 15.0f / (high - low) : 0.0f;
#pragma omp simd reduction(max : distance)
    for (int i = 0; i < 32; i++) {
        float steps = (b->values[i] - low) * per_step, q = rintf(steps), off = fabsf(steps - q);
        /* half a unit in the last place of bfloat16; less below a power of two, which the last check finds */
        float half = as_float(as_bits(b->values[i]) & 0x7f800000) * 0.00390625f;
        b->q[i] = q;
        b->inverse[i] = 1.0f / q;
        b->below[i] = b->values[i] - half;
        b->above[i] = b->values[i] + half;
        distance = off > distance ? off : distance;
    }
    return distance < 0.2f;
}

/* Finds step and offset of a block; 0 if there are none. For each float16 number that rounds to the lowest value as
 * offset, every other value bounds the step from both sides. */
static int fit(struct grid_block *b, uint16_t *step_bits, uint16_t *offset_bits) {
    if (!space_out(b))
        return 0;
    uint16_t center = (uint16_t)_cvtss_sh(b->low, 0);
    for (int distance = 0; distance <= 16; distance++) {
        uint16_t bits = (uint16_t)(center + (distance & 1 ? (distance + 1) / 2 : -(distance / 2)));
        float offset = _cvtsh_ss(bits), least = 0, most = 65504.0f;
        if (rounded(offset, BF16) != b->low)
            continue;
#pragma omp simd reduction(max : least) reduction(min : most)
        for (int i = 0; i < 32; i++) {
            float from = (b->below[i] - offset) * b->inverse[i], to = (b->above[i] - offset) * b->inverse[i];
            from = b->q[i] > 0 ? from : 0.0f;
            to = b->q[i] > 0 ? to : 65504.0f;
            least = from > least ? from : least;
            most = to < most ? to : most;
        }
        if (!(least <= most * 1.00001f))
            continue;
        uint16_t step = (uint16_t)_cvtss_sh(b->high > b->low ? 0.5f * (least + most) : 0.0f, 0);
        for (int nearby = 0; nearby < 5; nearby++) {
            uint16_t candidate = (uint16_t)(step + (nearby & 1 ? (nearby + 1) / 2 : -(nearby / 2)));
            if (reproduces(b->values, b->q, _cvtsh_ss(candidate), offset)) {
                *step_bits = candidate;
                *offset_bits = bits;
                return 1;
            }
        }
    }
    return 0;
}

struct gridding {
    const uint16_t *w;
    struct grid_half *packed;
    long rows, columns;
    _Atomic int failed;
};

static void grid_panel(void *argument, long panel) {
    struct gridding *g = argument;
    struct grid_half *half = g->packed + panel * (g->columns / 16);
    for (long column = 0; column < g->columns && !g->failed; column += 32)
        for (long first = panel * 32; first < panel * 32 + 32; first += 16, half++) {
            memset(half, 0, sizeof *half);
            for (int row = 0; row < 16 && first + row < g->rows; row++) {
                struct grid_block block;
                for (int i = 0; i < 32; i++)
                    block.values[i] = load(g->w, (first + row) * g->columns + column + i, BF16);
                if (!fit(&block, &half->steps[row], &half->offsets[row])) {
                    g->failed = 1;
                    return;
                }
                for (int i = 0; i < 32; i++)
                    half->lines[i / 2][row % 8 * 2 + i % 2] |= (uint8_t)((int)block.q[i] << (row < 8 ? 0 : 4));
            }
        }
}

EXPORT long aserve_grid_size(long rows, long columns) { return round_up(rows, 32) / 16 * (columns / 32) * GRID_HALF_BYTES; }

/* Writes w[rows][columns] to `packed`, of the size above; 0 if it does not lie on grids. */
EXPORT int aserve_pack_grid(const uint16_t *w, void *packed, long rows, long columns, int threads) {
    struct gridding g = {w, packed, rows, columns, 0};
    parallel_for(grid_panel, &g, (rows + 31) / 32, threads);
    return !g.failed;
}
