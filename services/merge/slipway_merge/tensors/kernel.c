/* One pass over rows of a bfloat16 weight: widen, add left @ right, round to nearest (ties to even), and account for it.
 *
 * Every element's products are added in the order of the rank by fused multiply-add, and the weight last. So the result has
 * the same bits on every processor and for every division into blocks; without fused multiply-add there is no kernel.
 */
#include <stdint.h>

/* Columns that are worked on at once: how the right factor is to be laid out. */
enum { PANEL = 32 };

struct counts {
    double weight_sum; /* sum of squares of the weight */
    int64_t changed;   /* elements whose stored value changed; two zeros are equal */
    int64_t finite;    /* whether no result is infinite or NaN */
};

#define KERNEL "kernel_rows.h"
#include "processors.h"

/* Columns of a panel of the right factor. */
int slipway_panel(void) { return PANEL; }
