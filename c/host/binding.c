/* What the Python binding needs beside mpm.h: sizes of structs and what lies in them, as plain numbers. */
#include <mpm.h>
#include <time.h>

uint32_t mpm_host_interpreter_bytes(void);
uint32_t mpm_host_arena_bytes(void);
void mpm_host_error(const struct mpm_interpreter *m, int64_t out[5], const char **what);
void mpm_host_report(const struct mpm_interpreter *m, uint32_t out[9]);
uint32_t mpm_host_clock(void);
void mpm_host_profile(struct mpm_interpreter *m, uint32_t *ticks);

uint32_t mpm_host_interpreter_bytes(void) { return (uint32_t)sizeof(struct mpm_interpreter); }

uint32_t mpm_host_arena_bytes(void) { return (uint32_t)sizeof(struct mpm_arena); }

void mpm_host_error(const struct mpm_interpreter *m, int64_t out[5], const char **what) {
    out[0] = m->error.status;
    out[1] = m->error.at;
    out[2] = m->error.tensor;
    out[3] = m->error.op;
    out[4] = m->error.subgraph;
    *what = m->error.what;
}

void mpm_host_report(const struct mpm_interpreter *m, uint32_t out[9]) {
    out[0] = m->needed_bytes;
    out[1] = m->scratch_bytes;
    out[2] = m->persistent_bytes;
    out[3] = m->variable_bytes;
    out[4] = m->graphs[0].op_count;
    out[5] = m->graph_count;
    out[6] = mpm_input_count(m);
    out[7] = mpm_output_count(m);
    out[8] = m->buffer_count;
}

uint32_t mpm_host_clock(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (uint32_t)((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
}

void mpm_host_profile(struct mpm_interpreter *m, uint32_t *ticks) { mpm_profile(m, mpm_host_clock, ticks); }
