/* Hostile files: start-up and, where that succeeds, one run and a reset, in an arena of just the size needed. Linked
 * with libFuzzer, or with FUZZ_MAIN a mutator of its own: random bytes, truncation, extreme words, bit flips, in equal
 * shares, as the study of TFLM did them.
 *     fuzz COUNT SEED MODEL...
 */
#include "../src/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES (1u << 20)
#define LONGEST (1u << 19)

#define ROUNDS 100u /* of WHILE: a loop whose condition was mutated may rightly run for ever */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static enum mpm_status try_model(const uint8_t *data, size_t size) {
    static uint8_t *memory;
    struct mpm_arena arena;
    struct mpm_interpreter m;
    struct mpm_tensor t;
    enum mpm_status status;
    uint8_t *model, *exact;
    uint32_t i;
    if (size > LONGEST) return MPM_BAD_FILE;
    if (memory == NULL) memory = aligned_alloc(16, ARENA_BYTES);
    model = malloc(size); /* at a multiple of 16, and of just this size: a byte past it is the sanitizer's */
    memcpy(model, data, size);
    mpm_arena_init(&arena, memory, ARENA_BYTES);
    status = mpm_init(&m, model, (uint32_t)size, &arena, mpm_all_kernels, mpm_all_kernels_count);
    if (status != MPM_OK) {
        free(model);
        return status;
    }
    /* again, in an arena of exactly the size that it asked for: a byte past it is the sanitizer's */
    exact = aligned_alloc(16, (m.needed_bytes + 15u) & ~15u);
    mpm_arena_init(&arena, exact, m.needed_bytes);
    if (mpm_init(&m, model, (uint32_t)size, &arena, mpm_all_kernels, mpm_all_kernels_count) != MPM_OK)
        abort();
    for (i = 0; i < mpm_input_count(&m); i++)
        if (mpm_input_info(&m, i, &t) == MPM_OK) memset(t.data, (int)(i * 37 + 11), t.bytes);
    mpm_limit_rounds(&m, ROUNDS);
    mpm_run(&m);
    mpm_reset(&m);
    for (i = 0; i < mpm_output_count(&m); i++)
        if (mpm_output_info(&m, i, &t) == MPM_OK && t.bytes != 0) memory[0] ^= ((const uint8_t *)t.data)[t.bytes - 1];
    free(exact);
    free(model);
    return MPM_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)try_model(data, size);
    return 0;
}

#ifdef FUZZ_MAIN
static uint64_t state;

static uint32_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static size_t mutate(uint8_t *data, size_t size) {
    static const uint32_t extremes[] = {0, 1, 0xffffffffu, 0x7fffffffu, 0x80000000u, 0xffffu, 0x7f800000u, 4};
    uint32_t n = next() % 2 ? 1 : 1 + next() % 8, i;
    switch (next() % 4) {
        case 0: for (i = 0; i < n; i++) data[next() % size] = (uint8_t)next(); break;
        case 1: return next() % size;
        case 2:
            for (i = 0; i < n && size >= 8; i++) memcpy(data + (next() % (size - 4) & ~3u), &extremes[next() % 8], 4);
            break;
        default: for (i = 0; i < n; i++) data[next() % size] ^= (uint8_t)(1u << next() % 8); break;
    }
    return size;
}

int main(int argc, char **argv) {
    const unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    unsigned long refused = 0, done = 0, i;
    int k;
    state = 0x9e3779b97f4a7c15u ^ (argc > 2 ? strtoul(argv[2], NULL, 10) * 2654435761u : 1);
    for (k = 3; k < argc; k++) {
        static uint8_t original[LONGEST], data[LONGEST];
        FILE *file = fopen(argv[k], "rb");
        size_t size;
        if (file == NULL) continue;
        size = fread(original, 1, LONGEST, file);
        fclose(file);
        for (i = 0; i < count && size > 8; i++, done++) {
            memcpy(data, original, size);
            refused += try_model(data, mutate(data, size)) != MPM_OK;
        }
    }
    printf("%lu mutated files, %lu refused, %lu run, 0 crashes\n", done, refused, done - refused);
    return 0;
}
#endif
