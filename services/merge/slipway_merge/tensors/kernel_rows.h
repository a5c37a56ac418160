/* The kernel for vectors of LANES floats and tiles of ROWS rows; included once for each kind of processor. */
#define ROWS (LANES == 16 ? 8 : 2)

enum { NAME(VECTORS) = PANEL / LANES };

typedef int32_t NAME(integers) __attribute__((vector_size(LANES * 4)));

struct NAME(sums) {
    NAME(floats) squares;
    NAME(words) changed, bad; /* bad: all ones once anything was not finite */
};

TARGET static inline __attribute__((always_inline)) void NAME(tile)(const uint16_t *weight, uint16_t *result, size_t stride,
                                                                    const float *left, const float *panel, const int rows,
                                                                    size_t rank, struct NAME(sums) *sums) {
    NAME(floats) update[ROWS][NAME(VECTORS)];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < NAME(VECTORS); v++)
            update[i][v] = (NAME(floats)){0};
    for (size_t k = 0; k < rank; k++)
        for (int v = 0; v < NAME(VECTORS); v++) {
            NAME(floats) right;
            memcpy(&right, panel + k * PANEL + v * LANES, sizeof right);
            for (int i = 0; i < rows; i++)
                update[i][v] += left[i * rank + k] * right;
        }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < NAME(VECTORS); v++) {
            NAME(halves) stored;
            memcpy(&stored, weight + i * stride + v * LANES, sizeof stored);
            NAME(floats) before = (NAME(floats))(__builtin_convertvector(stored, NAME(words)) << 16);
            NAME(floats) exact = before + update[i][v];
            NAME(words) bits = (NAME(words))exact;
            sums->bad |= (NAME(words))((NAME(integers))(bits & 0x7fffffff) > 0x7f7f7fff); /* it rounds to infinity, or is infinite or NaN already */
            bits += 0x7fff + ((bits >> 16) & 1);
            NAME(floats) after = (NAME(floats))(bits & 0xffff0000);
            sums->squares += before * before;
            sums->changed -= (NAME(words))(after != before);
            stored = __builtin_convertvector(bits >> 16, NAME(halves));
            memcpy(result + i * stride + v * LANES, &stored, sizeof stored);
        }
}

/* A tile that the matrix ends in: done in a copy that has all its columns. */
TARGET static void NAME(last_tile)(const uint16_t *weight, uint16_t *result, size_t stride, size_t columns, const float *left,
                                   const float *panel, int rows, size_t rank, struct NAME(sums) *sums) {
    for (int i = 0; i < rows; i++) {
        uint16_t copy[PANEL] = {0};
        memcpy(copy, weight + i * stride, columns * sizeof *copy);
        NAME(tile)(copy, copy, PANEL, left + i * rank, panel, 1, rank, sums);
        memcpy(result + i * stride, copy, columns * sizeof *copy);
    }
}

/* weight, result: (rows, columns); left: (rows, rank); panels: (columns / PANEL, rounded up; rank; PANEL), zeros at the end. */
TARGET void NAME(merge)(const uint16_t *weight, uint16_t *result, const float *left, const float *panels, size_t rows,
                        size_t columns, size_t rank, struct counts *counts) {
    struct NAME(sums) sums = {0};
    counts->weight_sum = 0;
    for (size_t row = 0; row < rows; row += ROWS) {
        int some = rows - row < ROWS ? (int)(rows - row) : ROWS;
        for (size_t column = 0; column < columns; column += PANEL) {
            const uint16_t *from = weight + row * columns + column;
            uint16_t *to = result + row * columns + column;
            const float *factor = left + row * rank, *panel = panels + column * rank;
            if (columns - column < PANEL)
                NAME(last_tile)(from, to, columns, columns - column, factor, panel, some, rank, &sums);
            else if (some == ROWS)
                NAME(tile)(from, to, columns, factor, panel, ROWS, rank, &sums);
            else
                for (int i = 0; i < some; i++)
                    NAME(tile)(from + i * columns, to + i * columns, columns, factor + i * rank, panel, 1, rank, &sums);
        }
        for (int lane = 0; lane < LANES; lane++)
            counts->weight_sum += sums.squares[lane]; /* in float64 from here on */
        sums.squares = (NAME(floats)){0};
    }
    counts->changed = 0;
    counts->finite = 1;
    for (int lane = 0; lane < LANES; lane++) {
        counts->changed += sums.changed[lane];
        counts->finite &= sums.bad[lane] == 0;
    }
}

#undef ROWS
