/* Includes KERNEL once for each kind of vectors that this kind of processor may have, and chooses one.
 *
 * Defined for each: LANES (floats of a vector), NAME(part) (the part's name with the kind behind it), TARGET (the
 * attribute of each function), and what vectors.h defines.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define LANES 16
#define NAME(part) part##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#include "vectors.h"
#include KERNEL
#undef LANES
#undef NAME
#undef TARGET
#define LANES 8
#define NAME(part) part##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "vectors.h"
#include KERNEL
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#define NAME(part) part##_neon
#define TARGET
#include "vectors.h"
#include KERNEL
#endif

/* The kind for this processor: with "avx512", call the functions whose names end in _avx512. NULL where there is none. */
const char *slipway_kernel(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return "avx2";
#elif defined(__aarch64__)
    return "neon";
#endif
    return NULL;
}
