/* What the files of the native CPU kernels share: bfloat16, vectors of the machine's width, and parallel loops.
 *
 * Everything is plain C with the vector extensions of GCC and Clang, so one source serves x86-64 and ARM; only the
 * matrix product (matmul.c) has instructions of its own. Nothing here knows Python or torch. Compiled at first use by
 * aserve_kernels/cpu/native/build.py, which includes all files into one translation unit.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));

INLINE long min_of(long a, long b) { return a < b ? a : b; }
INLINE long max_of(long a, long b) { return a > b ? a : b; }
INLINE long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

/* The element kinds of tensors: float32, or bfloat16 computed in float32 and rounded to nearest, ties to even. */
enum kind { F32 = 0, BF16 = 1 };

INLINE long size_of(int kind) { return kind == BF16 ? 2 : 4; }

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float load(const void *from, long i, int kind) {
    return kind == BF16 ? as_float((uint32_t)((const uint16_t *)from)[i] << 16) : ((const float *)from)[i];
}

INLINE uint16_t to_bf16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0 : rounded); /* rounding could carry a NaN into an infinity */
}

INLINE float rounded(float value, int kind) { return kind == BF16 ? as_float((uint32_t)to_bf16(value) << 16) : value; }

INLINE void store(void *to, long i, float value, int kind) {
    if (kind == BF16)
        ((uint16_t *)to)[i] = to_bf16(value);
    else
        ((float *)to)[i] = value;
}

/* exp(x) within 2 units in the last place; 0 below -87, the largest power below infinity above 88; NaN stays NaN. */
INLINE float exp_of(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits */
    float c = x < -87.0f ? -87.0f : x;
    c = c > 88.0f ? 88.0f : c;
    float t = c * 1.44269504f + shift;
    float n = t - shift;
    float r = c - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666657f + r * (0.0416667275f + r * (0.00833345205f + r * 0.00138885f)))));
    uint32_t power = (as_bits(t) - as_bits(shift) + 127u) << 23;
    float e = p * as_float(power);
    return x < -87.0f ? 0.0f : e;
}

/* Runs task(argument, i) for all i in [0, count). threads > 0: that many of this library's own; < 0: libgomp's. */
typedef void task_function(void *argument, long i);
static void parallel_for(task_function *task, void *argument, long count, int threads);
