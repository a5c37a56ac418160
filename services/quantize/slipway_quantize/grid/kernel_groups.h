/* The kernel for vectors of LANES floats; included once for each kind of processor. */

#if LANES == 16
#define MAX(a, b) ((NAME(floats))_mm512_max_ps((__m512)(a), (__m512)(b)))
#define MIN(a, b) ((NAME(floats))_mm512_min_ps((__m512)(a), (__m512)(b)))
#define WHERE_GREATER(a, b, yes, no) \
    ((NAME(floats))_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_GT_OQ), (__m512)(no), (__m512)(yes)))
#define INTEGER(a) ((NAME(floats))_mm512_roundscale_ps((__m512)(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define ADD_SQUARE(sum, a) ((NAME(floats))_mm512_fmadd_ps((__m512)(a), (__m512)(a), (__m512)(sum)))
#elif LANES == 8
#define MAX(a, b) ((NAME(floats))_mm256_max_ps((__m256)(a), (__m256)(b)))
#define MIN(a, b) ((NAME(floats))_mm256_min_ps((__m256)(a), (__m256)(b)))
#define WHERE_GREATER(a, b, yes, no) \
    ((NAME(floats))_mm256_blendv_ps((__m256)(no), (__m256)(yes), _mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_GT_OQ)))
#define INTEGER(a) ((NAME(floats))_mm256_round_ps((__m256)(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define ADD_SQUARE(sum, a) ((NAME(floats))_mm256_fmadd_ps((__m256)(a), (__m256)(a), (__m256)(sum)))
#else
#define MAX(a, b) ((NAME(floats))vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define MIN(a, b) ((NAME(floats))vminq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define WHERE_GREATER(a, b, yes, no) \
    ((NAME(floats))vbslq_f32(vcgtq_f32((float32x4_t)(a), (float32x4_t)(b)), (float32x4_t)(yes), (float32x4_t)(no)))
#define INTEGER(a) ((NAME(floats))vrndnq_f32((float32x4_t)(a)))
#define ADD_SQUARE(sum, a) ((NAME(floats))vfmaq_f32((float32x4_t)(sum), (float32x4_t)(a), (float32x4_t)(a)))
#endif

#define ALL(number) ((NAME(floats)){0} + (float)(number))
#define ABS(a) ((NAME(floats))((NAME(words))(a) & 0x7fffffff))
/* Added to a small number, it leaves no digits behind the point, and the number stands in the last bits. */
#define ROUNDER 0x1.8p23f
#define ROUNDER_BITS 0x4b400000u

/* Widen LANES stored weights; what is not finite in float16 becomes 65536 or more. */
TARGET static inline __attribute__((always_inline)) NAME(floats) NAME(widen)(const void *from, const int type) {
    NAME(floats) value;
    if (type == FLOAT32) {
        memcpy(&value, from, sizeof value);
        return value;
    }
    NAME(halves) stored;
    memcpy(&stored, from, sizeof stored);
    NAME(words) bits = __builtin_convertvector(stored, NAME(words));
    if (type == BFLOAT16)
        return (NAME(floats))(bits << 16);
    value = (NAME(floats))((bits & 0x7fff) << 13) * 0x1p112f;
    return (NAME(floats))((NAME(words))value | (bits & 0x8000) << 16);
}

#if LANES == 4
/* LANES groups side by side, from groups one after the other; only some of them exist. */
TARGET static inline __attribute__((always_inline)) void NAME(load_groups)(NAME(floats) *tile, const char *from, const int type,
                                                                           int64_t size, int some) {
    const size_t width = type == FLOAT32 ? 4 : 2;
    float *flat = (float *)tile;
    for (int lane = 0; lane < LANES; lane++) {
        for (int64_t k = 0; k < size; k += LANES) {
            NAME(floats) part = {0};
            if (lane < some)
                part = NAME(widen)(from + (size_t)(lane * size + k) * width, type);
            for (int i = 0; i < LANES; i++)
                flat[(k + i) * LANES + lane] = part[i];
        }
    }
}
#else
/* Widen eight stored weights, as NAME(widen). */
TARGET static inline __attribute__((always_inline)) __m256 NAME(widen_eight)(const void *from, const int type) {
    if (type == FLOAT32)
        return _mm256_loadu_ps(from);
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
    if (type == BFLOAT16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    __m256i size = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
    return _mm256_or_ps(_mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p112f)), _mm256_castsi256_ps(sign));
}

/* Store eight rows of eight floats as columns, LANES floats apart. */
TARGET static inline __attribute__((always_inline)) void NAME(store_columns)(float *to, const __m256 *rows) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int half = 0; half < 8; half += 4)
        for (int i = 0; i < 2; i++) {
            __m256d first = _mm256_castps_pd(pairs[half + i]), second = _mm256_castps_pd(pairs[half + 2 + i]);
            fours[half + 2 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(first, second));
            fours[half + 2 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(first, second));
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20));
        _mm256_storeu_ps(to + (4 + i) * LANES, _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31));
    }
}

/* LANES groups side by side, from groups one after the other; only some of them exist. */
TARGET static inline __attribute__((always_inline)) void NAME(load_groups)(NAME(floats) *tile, const char *from, const int type,
                                                                           int64_t size, int some) {
    const size_t width = type == FLOAT32 ? 4 : 2;
    float *flat = (float *)tile;
    for (int lane = 0; lane < LANES; lane += 8)
        for (int64_t k = 0; k < size; k += 8) {
            __m256 rows[8];
            for (int i = 0; i < 8; i++)
                rows[i] = lane + i < some ? NAME(widen_eight)(from + (size_t)((lane + i) * size + k) * width, type)
                                          : _mm256_setzero_ps();
            NAME(store_columns)(flat + k * LANES + lane, rows);
        }
}
#endif

/* LANES groups side by side, as columns of a stored matrix; only some of them exist. */
TARGET static inline __attribute__((always_inline)) void NAME(load_columns)(NAME(floats) *tile, const char *from, const int type,
                                                                            int64_t size, int64_t leading, int some) {
    const size_t width = type == FLOAT32 ? 4 : 2;
    for (int64_t k = 0; k < size; k++, from += leading * width) {
        if (some == LANES) {
            tile[k] = NAME(widen)(from, type);
        } else {
            char copy[LANES * 4] = {0};
            memcpy(copy, from, some * width);
            tile[k] = NAME(widen)(copy, type);
        }
    }
}

/* The nearest integers of the grid, ROUNDER added. */
TARGET static inline __attribute__((always_inline)) NAME(floats) NAME(nearest)(NAME(floats) weight, NAME(floats) inverse,
                                                                               const int limit) {
    return MAX(MIN(weight * inverse, ALL(limit - 1)), ALL(-limit)) + ROUNDER;
}

TARGET static inline __attribute__((always_inline)) NAME(floats) NAME(invert)(NAME(floats) scale) {
    return WHERE_GREATER(ALL(1e-37f), ABS(scale), ALL(0), ALL(1) / scale);
}

/* The scale with the smallest error of all tried steps, two at a time. */
TARGET static inline __attribute__((always_inline)) NAME(floats) NAME(fit)(const NAME(floats) *tile, const struct task *task,
                                                                           const int limit) {
    NAME(floats) largest = {0}, size = {0};
    for (int64_t k = 0; k < task->size; k++) {
        largest = WHERE_GREATER(ABS(tile[k]), size, tile[k], largest);
        size = MAX(ABS(tile[k]), size);
    }
    NAME(floats) step = largest / ALL(-limit), scale = step, best = ALL(-1);
    for (int64_t at = 0; at < task->count; at += 2) {
        NAME(floats) inverse[2], product[2] = {{0}}, square[2] = {{0}};
        for (int i = 0; i < 2; i++)
            inverse[i] = NAME(invert)(step * task->steps[at + i < task->count ? at + i : at]);
        for (int64_t k = 0; k < task->size; k++)
            for (int i = 0; i < 2; i++) {
                NAME(floats) code = MAX(MIN(INTEGER(tile[k] * inverse[i]), ALL(limit - 1)), ALL(-limit));
                product[i] += code * tile[k];
                square[i] = ADD_SQUARE(square[i], code); /* of small integers, so exact */
            }
        for (int i = 0; i < 2; i++) {
            NAME(floats) fitted = product[i] / MAX(square[i], ALL(1)), gain = fitted * product[i];
            scale = WHERE_GREATER(gain, best, fitted, scale);
            best = WHERE_GREATER(gain, best, gain, best);
        }
    }
    return scale;
}

/* Round LANES groups, of which some exist. at: number of the first; apart: from one to the next. */
TARGET static inline __attribute__((always_inline)) void NAME(round)(const NAME(floats) *tile, const struct task *task,
                                                                     const int bits, int64_t at, int64_t apart, int some,
                                                                     struct sums *sums) {
    /* Codes of 3 bits follow each other without gaps, so eight of them have three whole bytes. */
    const int limit = 1 << (bits - 1), codes = bits == 3 ? 8 : 32 / bits, bytes = codes * bits / 8;
    const int64_t count = task->size / codes;
    NAME(floats) scale = NAME(fit)(tile, task, limit), error = {0}, energy = {0};
    for (int lane = 0; lane < some; lane++) {
        scale[lane] = store_scale(task->scales, at + lane * apart, task->scale_type, scale[lane]);
        sums->fits &= __builtin_isfinite(scale[lane]) != 0;
    }
    NAME(floats) inverse = NAME(invert)(scale);
    NAME(words) packed[MOST / 4];
    for (int64_t word = 0; word < count; word++) {
        packed[word] = (NAME(words)){0};
        for (int i = 0; i < codes; i++) {
            NAME(floats) weight = tile[word * codes + i], rounded = NAME(nearest)(weight, inverse, limit);
            packed[word] += ((NAME(words))rounded << (bits * i)) - ((ROUNDER_BITS - limit) << (bits * i));
            NAME(floats) difference = (rounded - ROUNDER) * scale - weight;
            error += difference * difference;
            energy += weight * weight;
        }
    }
    for (int lane = 0; lane < some; lane++) {
        char *to = (char *)task->packed + (at + lane * apart) * count * bytes;
        for (int64_t word = 0; word < count; word++) {
            uint32_t whole = packed[word][lane];
            memcpy(to + word * bytes, &whole, bytes);
        }
        sums->error += error[lane];
        sums->energy += energy[lane];
    }
}

TARGET static inline __attribute__((always_inline)) void NAME(all)(const struct task *task, const int type, const int bits,
                                                                   struct sums *sums) {
    const int64_t width = type == FLOAT32 ? 4 : 2;
    const char *from = task->weight;
    NAME(floats) tile[MOST];
    sums->error = sums->energy = 0;
    sums->finite = sums->fits = 1;
    if (task->leading) {
        for (int64_t group = 0; group < task->groups; group++)
            for (int64_t row = 0; row < task->rows; row += LANES) {
                int some = task->rows - row < LANES ? (int)(task->rows - row) : LANES;
                const char *corner = from + (group * task->size * task->leading + row) * width;
                NAME(load_columns)(tile, corner, type, task->size, task->leading, some);
                NAME(round)(tile, task, bits, row * task->groups + group, task->groups, some, sums);
            }
    } else {
        int64_t total = task->rows * task->groups;
        for (int64_t at = 0; at < total; at += LANES) {
            int some = total - at < LANES ? (int)(total - at) : LANES;
            NAME(load_groups)(tile, from + at * task->size * width, type, task->size, some);
            NAME(round)(tile, task, bits, at, 1, some, sums);
        }
    }
    /* The squares of what is not finite are neither, and in float16, where it was widened to numbers, at least so large. */
    if (!(sums->energy < (type == FLOAT16 ? 0x1p32 : (double)__builtin_inff())))
        sums->finite = all_finite(task);
}

TARGET void NAME(quantize)(const struct task *task, struct sums *sums) {
    switch (task->weight_type * 16 + task->bits) {
    case FLOAT32 * 16 + 3: NAME(all)(task, FLOAT32, 3, sums); break;
    case FLOAT32 * 16 + 4: NAME(all)(task, FLOAT32, 4, sums); break;
    case FLOAT32 * 16 + 8: NAME(all)(task, FLOAT32, 8, sums); break;
    case FLOAT16 * 16 + 3: NAME(all)(task, FLOAT16, 3, sums); break;
    case FLOAT16 * 16 + 4: NAME(all)(task, FLOAT16, 4, sums); break;
    case FLOAT16 * 16 + 8: NAME(all)(task, FLOAT16, 8, sums); break;
    case BFLOAT16 * 16 + 3: NAME(all)(task, BFLOAT16, 3, sums); break;
    case BFLOAT16 * 16 + 4: NAME(all)(task, BFLOAT16, 4, sums); break;
    case BFLOAT16 * 16 + 8: NAME(all)(task, BFLOAT16, 8, sums); break;
    }
}

#undef MAX
#undef MIN
#undef WHERE_GREATER
#undef INTEGER
#undef ADD_SQUARE
#undef ALL
#undef ABS
#undef ROUNDER
#undef ROUNDER_BITS
