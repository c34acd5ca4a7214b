/* The operations that go through rows of activations: norms, rotary embedding, gated activations, cache writes.
 * Contracts: aserve_kernels/kernel_set.py. All strides count elements. */

#define ROW_ELEMENTS 8192 /* elements worth handing to another thread: about 2 us */

/* Rows are cut into pieces of about ROW_ELEMENTS; a call gives each piece to `run` with its first and last row. */
INLINE long rows_per_piece(long row_elements) { return max_of(1, ROW_ELEMENTS / max_of(1, row_elements)); }

struct norm {
    const void *x, *weight;
    void *residual, *out;
    long rows, heads, token_stride, head_stride, out_token_stride, out_head_stride, size, piece;
    float eps;
    int kind, weight_kind;
};

INLINE void norm_row(const struct norm *n, const void *x, void *residual, void *out, int kind, int weight_kind) {
    long size = n->size;
    float sum = 0;
    if (residual) {
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < size; i++) {
            float value = rounded(load(x, i, kind) + load(residual, i, kind), kind);
            store(residual, i, value, kind);
            sum += value * value;
        }
        x = residual;
    } else {
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < size; i++)
            sum += load(x, i, kind) * load(x, i, kind);
    }
    float scale = 1.0f / sqrtf(sum / (float)size + n->eps);
#pragma omp simd
    for (long i = 0; i < size; i++)
        store(out, i, rounded(load(x, i, kind) * scale, weight_kind) * load(n->weight, i, weight_kind), kind);
}

static void norm_piece(void *argument, long i) {
    const struct norm *n = argument;
    long end = min_of(n->rows, (i + 1) * n->piece), bytes = size_of(n->kind);
    for (long row = i * n->piece; row < end; row++) {
        long token = row / n->heads, head = row % n->heads;
        const char *x = (const char *)n->x + (token * n->token_stride + head * n->head_stride) * bytes;
        char *out = (char *)n->out + (token * n->out_token_stride + head * n->out_head_stride) * bytes;
        char *residual = n->residual ? (char *)n->residual + token * n->size * bytes : NULL;
        if (n->kind == F32)
            norm_row(n, x, residual, out, F32, F32);
        else if (n->weight_kind == BF16)
            norm_row(n, x, residual, out, BF16, BF16);
        else
            norm_row(n, x, residual, out, BF16, F32);
    }
}

EXPORT void aserve_rms_norm(
    const void *x, const void *weight, void *residual, void *out, long tokens, long heads, long token_stride,
    long head_stride, long out_token_stride, long out_head_stride, long size, double eps, int kind, int weight_kind,
    int threads) {
    struct norm n = {x, weight, residual, out, tokens * heads, heads, token_stride, head_stride, out_token_stride,
                     out_head_stride, size, rows_per_piece(size), (float)eps, kind, weight_kind};
    parallel_for(norm_piece, &n, (n.rows + n.piece - 1) / n.piece, threads);
}

struct rotary {
    void *q, *k;
    const int64_t *positions;
    const float *table;
    long tokens, q_stride, k_stride, heads, kv_heads, dim, rotated, piece;
    int kind;
};

INLINE void rotate_heads(void *x, long heads, long dim, long half, const float *angles, int kind) {
    for (long head = 0; head < heads; head++) {
        char *first = (char *)x + head * dim * size_of(kind), *second = first + half * size_of(kind);
#pragma omp simd
        for (long i = 0; i < half; i++) {
            float a = load(first, i, kind), b = load(second, i, kind), c = angles[i], s = angles[half + i];
            store(first, i, a * c - b * s, kind);
            store(second, i, b * c + a * s, kind);
        }
    }
}

static void rotary_piece(void *argument, long i) {
    const struct rotary *r = argument;
    long end = min_of(r->tokens, (i + 1) * r->piece), half = r->rotated / 2;
    for (long token = i * r->piece; token < end; token++) {
        const float *angles = r->table + r->positions[token] * r->rotated;
        char *q = (char *)r->q + token * r->q_stride * size_of(r->kind);
        char *k = (char *)r->k + token * r->k_stride * size_of(r->kind);
        if (r->kind == BF16) {
            rotate_heads(q, r->heads, r->dim, half, angles, BF16);
            rotate_heads(k, r->kv_heads, r->dim, half, angles, BF16);
        } else {
            rotate_heads(q, r->heads, r->dim, half, angles, F32);
            rotate_heads(k, r->kv_heads, r->dim, half, angles, F32);
        }
    }
}

EXPORT void aserve_rotary(
    void *q, void *k, const int64_t *positions, const float *table, long tokens, long q_stride, long k_stride,
    long heads, long kv_heads, long dim, long rotated, int kind, int threads) {
    struct rotary r = {q, k, positions, table, tokens, q_stride, k_stride, heads, kv_heads, dim, rotated,
                       rows_per_piece((heads + kv_heads) * dim), kind};
    parallel_for(rotary_piece, &r, (tokens + r.piece - 1) / r.piece, threads);
}

enum activation { SILU = 0, GELU_TANH = 1 };

struct gate {
    const void *x;
    void *out;
    long tokens, stride, out_stride, size, piece;
    int kind, activation;
};

INLINE void gate_row(const void *x, void *out, long size, int kind, int activation) {
    const char *up = (const char *)x + size * size_of(kind);
#pragma omp simd
    for (long i = 0; i < size; i++) {
        float g = load(x, i, kind);
        /* gelu: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3) */
        float exponent = activation == SILU ? g : 1.59576912f * (g + 0.044715f * g * g * g);
        float activated = g / (1.0f + exp_of(-exponent));
        store(out, i, rounded(activated, kind) * load(up, i, kind), kind);
    }
}

static void gate_piece(void *argument, long i) {
    const struct gate *g = argument;
    long end = min_of(g->tokens, (i + 1) * g->piece), bytes = size_of(g->kind);
    for (long token = i * g->piece; token < end; token++) {
        const char *x = (const char *)g->x + token * g->stride * bytes;
        char *out = (char *)g->out + token * g->out_stride * bytes;
        switch (g->kind * 2 + g->activation) {
        case F32 * 2 + SILU: gate_row(x, out, g->size, F32, SILU); break;
        case F32 * 2 + GELU_TANH: gate_row(x, out, g->size, F32, GELU_TANH); break;
        case BF16 * 2 + SILU: gate_row(x, out, g->size, BF16, SILU); break;
        default: gate_row(x, out, g->size, BF16, GELU_TANH);
        }
    }
}

EXPORT void aserve_gate(
    const void *x, void *out, long tokens, long stride, long out_stride, long size, int kind, int activation,
    int threads) {
    struct gate g = {x, out, tokens, stride, out_stride, size, rows_per_piece(2 * size), kind, activation};
    parallel_for(gate_piece, &g, (tokens + g.piece - 1) / g.piece, threads);
}

/* Strides and sizes in bytes: a row of a token or of the cache is copied as it is. */
EXPORT void aserve_store_kv(
    const char *k, const char *v, char *k_cache, char *v_cache, const int64_t *slots, long tokens, long k_stride,
    long v_stride, long row_bytes) {
    for (long token = 0; token < tokens; token++) {
        if (slots[token] < 0)
            continue;
        memcpy(k_cache + slots[token] * row_bytes, k + token * k_stride, (size_t)row_bytes);
        memcpy(v_cache + slots[token] * row_bytes, v + token * v_stride, (size_t)row_bytes);
    }
}
