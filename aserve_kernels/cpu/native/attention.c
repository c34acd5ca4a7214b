/* Causal attention of prefill chunks and decodes, straight over the pages of the KV cache.
 *
 * A task is one KV head of one sequence and up to MOST_ROWS rows, a row being a query token and one of the query heads
 * that share the KV head. It goes through the keys in blocks at fixed positions (the softmax is carried along), so what
 * a row computes has no part of its batch. Only positions that some row of the task sees are read. Contract:
 * aserve_kernels/kernel_set.py. */

#define KEYS 64 /* positions of a block */
#define MOST_ROWS 96
#define FEW_ROWS 6 /* up to here, scores come from dot products; beyond, keys are turned first */
#define MOST_DIM 512

#if LANES == 8
#define TILE_VECS 2 /* AVX2 has 16 registers */
#else
#define TILE_VECS 4
#endif

struct attention {
    const char *q;
    char *out;
    const char *k_cache, *v_cache;
    const int32_t *tables, *bounds, *lengths;
    long num_seqs, q_stride, out_stride, table_width, heads, kv_heads, dim, block_size, k_block, v_block, window;
    float scale, softcap;
    int kind;
    struct attention_task *tasks;
};

struct attention_task {
    int32_t sequence, first_query, num_queries, first_head, num_heads;
};

/* c[rows][columns] (+)= a[rows][depth] b[depth][columns]; columns are a multiple of LANES. */
INLINE void multiply_tile(
    const float *a, long lda, const float *b, long ldb, float *c, long ldc, long depth, int rows, int vecs, int add) {
    vec sums[4][TILE_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            if (add)
                memcpy(&sums[r][v], c + r * ldc + v * LANES, sizeof(vec));
            else
                sums[r][v] = (vec){0};
    for (long d = 0; d < depth; d++) {
        vec column[TILE_VECS];
        for (int v = 0; v < vecs; v++)
            memcpy(&column[v], b + d * ldb + v * LANES, sizeof(vec));
        for (int r = 0; r < rows; r++) {
            float factor = a[r * lda + d];
            for (int v = 0; v < vecs; v++)
                sums[r][v] += factor * column[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            memcpy(c + r * ldc + v * LANES, &sums[r][v], sizeof(vec));
}

INLINE void multiply_rows(
    const float *a, long lda, const float *b, long ldb, float *c, long ldc, long depth, long columns, int rows,
    int add) {
    long column = 0;
    for (; column + TILE_VECS * LANES <= columns; column += TILE_VECS * LANES)
        multiply_tile(a, lda, b + column, ldb, c + column, ldc, depth, rows, TILE_VECS, add);
    for (; column < columns; column += LANES)
        multiply_tile(a, lda, b + column, ldb, c + column, ldc, depth, rows, 1, add);
}

static void multiply(
    const float *a, long lda, const float *b, long ldb, float *c, long ldc, long rows, long depth, long columns,
    int add) {
    long row = 0;
    for (; row + 4 <= rows; row += 4)
        multiply_rows(a + row * lda, lda, b, ldb, c + row * ldc, ldc, depth, columns, 4, add);
    a += row * lda, c += row * ldc;
    switch (rows - row) {
    case 3: multiply_rows(a, lda, b, ldb, c, ldc, depth, columns, 3, add); break;
    case 2: multiply_rows(a, lda, b, ldb, c, ldc, depth, columns, 2, add); break;
    case 1: multiply_rows(a, lda, b, ldb, c, ldc, depth, columns, 1, add); break;
    }
}

INLINE void widen(float *to, const char *from, long count, float scale, int kind) {
#pragma omp simd
    for (long i = 0; i < count; i++)
        to[i] = load(from, i, kind) * scale;
}

INLINE float sum_of(vec v) {
    float lanes[LANES], sum = 0;
    memcpy(lanes, &v, sizeof v);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

INLINE void score_rows(const float *queries, const float *keys, float *scores, long count, long width, int rows) {
    for (long j = 0; j < count; j++, keys += width) {
        vec sums[3] = {{0}, {0}, {0}};
        for (long d = 0; d < width; d += LANES) {
            vec key, query;
            memcpy(&key, keys + d, sizeof key);
            for (int row = 0; row < rows; row++) {
                memcpy(&query, queries + row * width + d, sizeof query);
                sums[row] += query * key;
            }
        }
        for (int row = 0; row < rows; row++)
            scores[row * KEYS + j] = sum_of(sums[row]);
    }
}

/* scores[rows][KEYS] of queries [rows][width] and keys [KEYS][width], of which `count` hold something */
INLINE void score(
    const float *queries, const float *keys, float *turned, float *scores, long rows, long count, long width) {
    if (rows <= FEW_ROWS) {
        for (long row = 0; row < rows; row += 3)
            switch (rows - row) {
            case 1: score_rows(queries + row * width, keys, scores + row * KEYS, count, width, 1); break;
            case 2: score_rows(queries + row * width, keys, scores + row * KEYS, count, width, 2); break;
            default: score_rows(queries + row * width, keys, scores + row * KEYS, count, width, 3);
            }
        return;
    }
    for (long j = 0; j < count; j++)
        for (long d = 0; d < width; d++)
            turned[d * KEYS + j] = keys[j * width + d];
    multiply(queries, width, turned, KEYS, scores, KEYS, rows, width, round_up(count, LANES), 0);
}

/* Turns a row of scores, of which [first, last) are visible, into weights relative to the largest so far; returns by
 * what the row's earlier sums must be multiplied. */
static float weigh(float *scores, long first, long last, long count, float softcap, float *largest, float *total) {
    float before = *largest, now = before, sum = 0;
    if (softcap > 0) {
        for (long j = first; j < last; j++)
            scores[j] = softcap * (1.0f - 2.0f / (1.0f + exp_of(2.0f / softcap * scores[j])));
    }
#pragma omp simd reduction(max : now)
    for (long j = first; j < last; j++)
        now = scores[j] > now ? scores[j] : now;
    for (long j = 0; j < first; j++)
        scores[j] = 0;
    for (long j = last; j < count; j++)
        scores[j] = 0;
#pragma omp simd reduction(+ : sum)
    for (long j = first; j < last; j++) {
        scores[j] = exp_of(scores[j] - now);
        sum += scores[j];
    }
    float correction = before == now ? 1.0f : exp_of(before - now);
    *largest = now;
    *total = *total * correction + sum;
    return correction;
}

/* The arrays of one task; rows of `width` = dim rounded up to whole vectors, filled up with zeros. */
struct workspace {
    float *queries, *keys, *values, *turned, *outputs;
    float scores[MOST_ROWS * KEYS], largest[MOST_ROWS], total[MOST_ROWS];
};

/* Reads positions [start, end) of the task's KV head into rows of keys and values, page by page. */
INLINE void read_keys(
    const struct attention *a, const struct attention_task *t, struct workspace *w, long start, long end, long dim,
    int kind) {
    const int32_t *page = a->tables + t->sequence * a->table_width + start / a->block_size;
    long place = start % a->block_size, width = round_up(dim, LANES), step = a->kv_heads * dim * size_of(kind);
    long head = t->first_head / (a->heads / a->kv_heads) * dim * size_of(kind);
    float *keys = w->keys, *values = w->values;
    for (long left = end - start; left > 0; page++, place = 0) {
        const char *k = a->k_cache + *page * a->k_block * size_of(kind) + place * step + head;
        const char *v = a->v_cache + *page * a->v_block * size_of(kind) + place * step + head;
        long count = min_of(left, a->block_size - place);
        for (long i = 0; i < count; i++, k += step, v += step, keys += width, values += width) {
            widen(keys, k, dim, 1.0f, kind);
            widen(values, v, dim, 1.0f, kind);
            for (long d = dim; d < width; d++)
                keys[d] = values[d] = 0;
        }
        left -= count;
    }
}

INLINE void attend(const struct attention *a, const struct attention_task *t, struct workspace *w, long dim, int kind) {
    long width = round_up(dim, LANES), rows = (long)t->num_queries * t->num_heads;
    long length = a->lengths[t->sequence], first_row = a->bounds[t->sequence];
    long first = length - (a->bounds[t->sequence + 1] - first_row) + t->first_query; /* position of the first query */
    for (long row = 0; row < rows; row++) {
        long query = first_row + t->first_query + row / t->num_heads, head = t->first_head + row % t->num_heads;
        const char *q = a->q + (query * a->q_stride + head * dim) * size_of(kind);
        widen(w->queries + row * width, q, dim, a->scale, kind);
        for (long d = dim; d < width; d++)
            w->queries[row * width + d] = 0;
        w->largest[row] = -INFINITY;
        w->total[row] = 0;
    }
    memset(w->outputs, 0, sizeof(float) * (size_t)(rows * width));
    long low = a->window ? max_of(0, first - a->window + 1) : 0, high = first + t->num_queries;
    for (long block = low / KEYS * KEYS; block < high; block += KEYS) {
        long start = max_of(block, low), count = min_of(block + KEYS, high) - start;
        read_keys(a, t, w, start, start + count, dim, kind);
        score(w->queries, w->keys, w->turned, w->scores, rows, count, width);
        for (long row = 0; row < rows; row++) {
            long position = first + row / t->num_heads;
            long visible = a->window ? max_of(0, position - a->window + 1 - start) : 0;
            float correction = weigh(w->scores + row * KEYS, min_of(visible, count),
                                     max_of(min_of(visible, count), min_of(count, position + 1 - start)), count,
                                     a->softcap, &w->largest[row], &w->total[row]);
            if (correction != 1.0f)
                for (long d = 0; d < width; d++)
                    w->outputs[row * width + d] *= correction;
        }
        multiply(w->scores, KEYS, w->values, width, w->outputs, width, rows, count, width, 1);
    }
    for (long row = 0; row < rows; row++) {
        long query = first_row + t->first_query + row / t->num_heads, head = t->first_head + row % t->num_heads;
        char *out = a->out + (query * a->out_stride + head * dim) * size_of(kind);
        float scale = 1.0f / w->total[row];
        for (long d = 0; d < dim; d++)
            store(out, d, w->outputs[row * width + d] * scale, kind);
    }
}

static void attend_task(void *argument, long i) {
    const struct attention *a = argument;
    const struct attention_task *t = &a->tasks[i];
    long width = round_up(a->dim, LANES), rows = (long)t->num_queries * t->num_heads;
    long turned = rows > FEW_ROWS ? width * KEYS : 0;
    float arrays[(2 * rows * width + 2 * KEYS * width + turned) + LANES];
    float *next = (float *)round_up((intptr_t)arrays, sizeof(vec));
    struct workspace w;
    w.queries = next, next += rows * width;
    w.outputs = next, next += rows * width;
    w.keys = next, next += KEYS * width;
    w.values = next, next += KEYS * width;
    w.turned = next;
    if (a->kind == F32)
        attend(a, t, &w, a->dim, F32);
    else if (a->dim == 64) /* of most small models: loops of known length; each further size is compiled for 0.3 s */
        attend(a, t, &w, 64, BF16);
    else
        attend(a, t, &w, a->dim, BF16);
}

/* Cuts the step into tasks; returns their number. With `tasks` NULL it only counts. */
static long cut(const struct attention *a, struct attention_task *tasks) {
    long count = 0, group = a->heads / a->kv_heads;
    long heads = min_of(group, MOST_ROWS), queries = max_of(1, MOST_ROWS / group);
    for (int s = 0; s < a->num_seqs; s++) {
        long num_queries = a->lengths[s] ? a->bounds[s + 1] - a->bounds[s] : 0;
        for (long first = 0; first < num_queries; first += queries)
            for (long head = 0; head < a->heads; head += heads) {
                long left = group - head % group; /* of the query heads that share the KV head */
                long these = min_of(heads, left);
                if (tasks)
                    tasks[count] = (struct attention_task){s, (int32_t)first, (int32_t)min_of(queries, num_queries - first),
                                                           (int32_t)head, (int32_t)these};
                count++;
                head -= heads - these;
            }
    }
    return count;
}

/* Returns 0, or -1 if memory ran out. */
EXPORT int aserve_paged_attention(
    const char *q, char *out, const char *k_cache, const char *v_cache, const int32_t *tables, const int32_t *bounds,
    const int32_t *lengths, long num_seqs, long q_stride, long out_stride, long table_width, long heads, long kv_heads,
    long dim, long block_size, long k_block, long v_block, double scale, long window, double softcap, int kind,
    int threads) {
    struct attention a = {q, out, k_cache, v_cache, tables, bounds, lengths, num_seqs, q_stride, out_stride,
                          table_width, heads, kv_heads, dim, block_size, k_block, v_block, window, (float)scale,
                          (float)softcap, kind, NULL};
    long count = cut(&a, NULL);
    a.tasks = malloc(sizeof(struct attention_task) * (size_t)(count + 1));
    if (!a.tasks)
        return -1;
    cut(&a, a.tasks);
    for (long s = 0; s < num_seqs; s++)
        for (long row = bounds[s]; !lengths[s] && row < bounds[s + 1]; row++)
            memset(out + row * out_stride * size_of(kind), 0, (size_t)(heads * dim * size_of(kind)));
    parallel_for(attend_task, &a, count, threads);
    free(a.tasks);
    return 0;
}
