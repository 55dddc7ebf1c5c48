/* Runs a model once on a fixed input and prints a hash of its outputs, the memory it took, and what went wrong. */
#include <mpm.h>

#include "model.h" /* model_data, model_bytes, model_kernels, model_kernels_count, model_arena_bytes */

void firmware_print(const char *text);
void bench_begin(void);
void bench_end(void);

/* Between these two a plugin of QEMU counts instructions. */
__attribute__((noinline)) void bench_begin(void) { __asm__ volatile("" ::: "memory"); }
__attribute__((noinline)) void bench_end(void) { __asm__ volatile("nop" ::: "memory"); }

static uint8_t memory[MODEL_ARENA_BYTES] __attribute__((aligned(16)));

static void print_number(const char *name, uint32_t value, int hex) {
    char text[12];
    int at = 11;
    text[11] = 0;
    do {
        text[--at] = "0123456789abcdef"[value % (hex ? 16u : 10u)];
        value /= hex ? 16u : 10u;
    } while (value != 0);
    firmware_print(name);
    firmware_print(" ");
    firmware_print(text + at);
    firmware_print("\n");
}

/* s = s * 1664525 + 1013904223; a byte is s >> 24, a float32 is (int32)s / 2^31. */
static void fill(void *to, const struct mpm_tensor *t, uint32_t *s) {
    uint32_t i;
    for (i = 0; i < (t->type == MPM_FLOAT32 ? t->count : t->bytes); i++) {
        *s = *s * 1664525u + 1013904223u;
        if (t->type == MPM_FLOAT32) ((float *)to)[i] = (float)(int32_t)*s / 2147483648.0f;
        else ((uint8_t *)to)[i] = (uint8_t)(*s >> 24);
    }
}

int main(void) {
    struct mpm_arena arena;
    static struct mpm_interpreter m;
    struct mpm_tensor t;
    uint32_t i, k, s = 12345, hash = 2166136261u;
    enum mpm_status status;
    mpm_arena_init(&arena, memory, sizeof memory);
#ifdef BENCH_INIT
    bench_begin();
#endif
    status = mpm_init(&m, model_data, model_bytes, &arena, model_kernels, model_kernels_count);
#ifdef BENCH_INIT
    bench_end();
#endif
    print_number("needed", m.needed_bytes, 0);
    if (status != MPM_OK) {
        print_number("status", (uint32_t)status, 0);
        print_number("op", (uint32_t)m.error.op, 0);
        firmware_print(m.error.what);
        return 1;
    }
    for (i = 0; i < mpm_input_count(&m); i++)
        if (mpm_input_info(&m, i, &t) == MPM_OK) fill(t.data, &t, &s);
#ifndef BENCH_INIT
    bench_begin();
#endif
    status = mpm_run(&m);
#ifndef BENCH_INIT
    bench_end();
#endif
    if (status != MPM_OK) print_number("status", (uint32_t)status, 0);
    for (i = 0; i < mpm_output_count(&m); i++)
        if (mpm_output_info(&m, i, &t) == MPM_OK)
            for (k = 0; k < t.bytes; k++) hash = (hash ^ ((const uint8_t *)t.data)[k]) * 16777619u;
    print_number("hash", hash, 1);
    print_number("scratch", m.scratch_bytes, 0);
    print_number("persistent", m.persistent_bytes, 0);
    print_number("interpreter", sizeof m, 0);
    return status != MPM_OK;
}
