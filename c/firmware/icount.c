/* A plugin of QEMU (API version 1): counts instructions between two addresses, in all and for each function. It
 * declares the few functions it uses, so QEMU's headers are not needed.
 *     -plugin ./libicount.so,begin=0x..,end=0x..,syms=FILE     FILE: sorted lines "low high name", hex */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef struct qemu_info qemu_info_t;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t i);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*cb)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, void (*cb)(unsigned, void *), int flags,
                                            void *);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *insn, int op, void *ptr, uint64_t imm);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

#define MOST 8192
static struct function { uint64_t low, high; char name[64]; uint64_t now, before; } functions[MOST];
static size_t count = 1;
static uint64_t begin_at, end_at;

static struct function *of(uint64_t at) {
    for (size_t i = 1; i < count; i++)
        if (functions[i].low <= at && at < functions[i].high) return &functions[i];
    return &functions[0];
}

static void begin(unsigned cpu, void *data) {
    (void)cpu, (void)data;
    for (size_t i = 0; i < count; i++) functions[i].before = functions[i].now;
}

static void end(unsigned cpu, void *data) {
    uint64_t sum = 0;
    (void)cpu, (void)data;
    for (size_t i = 0; i < count; i++) sum += functions[i].now - functions[i].before;
    printf("instructions %" PRIu64 "\n", sum);
    for (size_t i = 0; i < count; i++)
        if (functions[i].now != functions[i].before)
            printf("  %12" PRIu64 " %s\n", functions[i].now - functions[i].before, functions[i].name);
    fflush(stdout);
}

static void translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    for (size_t i = 0, n = qemu_plugin_tb_n_insns(tb); i < n; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        const uint64_t at = qemu_plugin_insn_vaddr(insn);
        if (at == begin_at) qemu_plugin_register_vcpu_insn_exec_cb(insn, begin, 0, NULL);
        if (at == end_at) qemu_plugin_register_vcpu_insn_exec_cb(insn, end, 0, NULL);
        qemu_plugin_register_vcpu_insn_exec_inline(insn, 0, &of(at)->now, 1);
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
                                                               char **argv) {
    (void)info;
    strcpy(functions[0].name, "?");
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "begin=", 6) == 0) begin_at = strtoull(argv[i] + 6, NULL, 16);
        if (strncmp(argv[i], "end=", 4) == 0) end_at = strtoull(argv[i] + 4, NULL, 16);
        if (strncmp(argv[i], "syms=", 5) == 0) {
            FILE *file = fopen(argv[i] + 5, "r");
            struct function *f = &functions[count];
            while (file && count < MOST &&
                   fscanf(file, "%" SCNx64 " %" SCNx64 " %63s", &f->low, &f->high, f->name) == 3)
                f = &functions[++count];
            if (file) fclose(file);
        }
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    return 0;
}
