/* Rounds groups of weights to integers and a scale each: search.py says how, and does the same bit for bit.
 *
 * A vector's lanes are different groups, so every sum is made in the order of the weights, whatever the processor. Products and
 * sums are rounded one by one: compile without contraction to fused multiply-add.
 */
#define KERNEL "kernel_groups.h"
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST = 256 }; /* weights of a group */

enum type { FLOAT32, FLOAT16, BFLOAT16 };

struct task {
    const void *weight;
    void *scales;        /* (rows, groups) */
    void *packed;        /* (rows, groups, size * bits / 8) bytes */
    const float *steps;  /* tried steps, relative to the one that reaches the largest weight */
    int64_t count;       /* of steps */
    int64_t rows;
    int64_t groups;      /* of a row */
    int64_t size;        /* weights of a group: 16 to MOST, a power of two */
    int64_t bits;        /* 3, 4 or 8 */
    int64_t leading;     /* 0: (rows, columns) one after the other; else (columns, rows), columns so many elements apart */
    int64_t weight_type; /* enum type */
    int64_t scale_type;  /* enum type */
};

struct sums {
    double error;   /* sum of squares of what rounding adds */
    double energy;  /* sum of squares of the weights */
    int64_t finite; /* whether all weights are finite */
    int64_t fits;   /* whether all scales are finite in their type */
};

static inline float from_half(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    return half & 0x8000 ? -value : value;
}

/* Rounded to nearest, ties to even; infinity for what is too large. */
static inline uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* below 2^-14: the last digit of a number from 0.5 to 1 is worth what that of a subnormal half is */
        memcpy(&value, &bits, sizeof value);
        value += 0.5f;
        memcpy(&bits, &value, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}

/* Store a scale in its type; return the stored value. */
static inline float store_scale(void *scales, int64_t at, int64_t type, float scale) {
    uint32_t bits;
    if (type == FLOAT16) {
        ((uint16_t *)scales)[at] = to_half(scale);
        return (((uint16_t *)scales)[at] & 0x7c00) == 0x7c00 ? __builtin_inff() : from_half(((uint16_t *)scales)[at]);
    }
    if (type == BFLOAT16) {
        memcpy(&bits, &scale, sizeof bits);
        bits += 0x7fff + (bits >> 16 & 1);
        ((uint16_t *)scales)[at] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000;
        memcpy(&scale, &bits, sizeof bits);
        return scale;
    }
    ((float *)scales)[at] = scale;
    return scale;
}

/* Whether all weights are finite, one by one. */
static int all_finite(const struct task *task) {
    const int64_t columns = task->groups * task->size, apart = task->leading ? task->leading : columns;
    const int64_t lines = task->leading ? columns : task->rows, length = task->leading ? task->rows : columns;
    const size_t width = task->weight_type == FLOAT32 ? 4 : 2;
    const uint32_t mask = task->weight_type == FLOAT16 ? 0x7c00 : task->weight_type == BFLOAT16 ? 0x7f80 : 0x7f800000;
    for (int64_t line = 0; line < lines; line++)
        for (int64_t at = line * apart; at < line * apart + length; at++) {
            uint32_t bits = 0; /* the lower half of it, for two bytes */
            memcpy(&bits, (const char *)task->weight + at * width, width);
            if ((bits & mask) == mask)
                return 0;
        }
    return 1;
}

#include "processors.h"
