/* Types of vectors of LANES floats; included once for each kind. */

typedef float NAME(floats) __attribute__((vector_size(LANES * 4)));
typedef uint32_t NAME(words) __attribute__((vector_size(LANES * 4)));
typedef uint16_t NAME(halves) __attribute__((vector_size(LANES * 2)));
