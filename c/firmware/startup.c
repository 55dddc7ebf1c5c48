/* Start-up for Cortex-M and 32-bit RISC-V in QEMU: vectors, data, bss, main, and the end by semihosting. No
 * interrupts. */
#include <stdint.h>

extern uint32_t __stack_top, __data_start, __data_end, __data_load, __bss_start, __bss_end;
int main(void);
void firmware_exit(int code);
void reset_handler(void);

#ifdef __riscv
static int semihost(int operation, const void *argument) {
    register int a0 __asm__("a0") = operation;
    register const void *a1 __asm__("a1") = argument;
    __asm__ volatile(
        ".balign 16\n .option push\n .option norvc\n slli x0, x0, 0x1f\n ebreak\n srai x0, x0, 7\n .option pop"
        : "+r"(a0)
        : "r"(a1)
        : "memory");
    return a0;
}
#else
static int semihost(int operation, const void *argument) {
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}
#endif

void firmware_exit(int code) {
    const uint32_t extended[2] = {0x20026, (uint32_t)code}; /* ADP_Stopped_ApplicationExit */
    semihost(0x20, extended);                               /* SYS_EXIT_EXTENDED */
    for (;;) semihost(0x18, (const void *)0x20026);         /* SYS_EXIT */
}

void firmware_print(const char *text);
void firmware_print(const char *text) { semihost(0x04, text); }

static void start(void) {
    uint32_t *to, *from = &__data_load;
#if defined(__ARM_FP) || defined(__ARM_FEATURE_MVE)
    *(volatile uint32_t *)0xe000ed88 |= 0xfu << 20; /* CPACR: the floating-point unit, on */
    __asm__ volatile("dsb\n isb");
#endif
    for (to = &__data_start; to < &__data_end;) *to++ = *from++;
    for (to = &__bss_start; to < &__bss_end;) *to++ = 0;
    firmware_exit(main());
}

#ifdef __riscv
__attribute__((section(".vectors"), naked, used)) void reset_handler(void) {
    __asm__ volatile("la sp, __stack_top\n call %0" : : "i"(start));
}
#else
static void fault(void) {
    firmware_print("fault\n");
    firmware_exit(3);
}

void reset_handler(void) { start(); }

__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    &__stack_top, (const void *)reset_handler, (const void *)fault, (const void *)fault, (const void *)fault,
    (const void *)fault, (const void *)fault};
#endif
