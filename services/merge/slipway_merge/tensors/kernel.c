/* One pass over rows of a bfloat16 weight: widen, add left @ right, round to nearest (ties to even), and account for it.
 *
 * Every element's products are added in the order of the rank by fused multiply-add, and the weight last. So the result has
 * the same bits on every processor and for every division into blocks; without fused multiply-add there is no kernel.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Columns that are worked on at once: how the right factor is to be laid out. */
enum { PANEL = 32 };

struct counts {
    double weight_sum; /* sum of squares of the weight */
    int64_t changed;   /* elements whose stored value changed; two zeros are equal */
    int64_t finite;    /* whether no result is infinite or NaN */
};

#if defined(__x86_64__)
#define LANES 16
#define ROWS 8
#define NAME(part) part##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#include "kernel_rows.h"
#define LANES 8
#define ROWS 2
#define NAME(part) part##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "kernel_rows.h"
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 2
#define NAME(part) part##_neon
#define TARGET
#include "kernel_rows.h"
#endif

/* The kernel for this processor: "avx512" is merge_avx512; NULL where there is none. */
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

/* Columns of a panel of the right factor. */
int slipway_panel(void) { return PANEL; }
